"""Rewards for worker processes; the module imports nothing that takes time."""

import asyncio
import os
import re
import subprocess
import time
import zlib


def right(completion, answer):
    return float(completion == answer)


def pid(completion, answer):
    """The process that it runs in."""
    return float(os.getpid())


def hangs(completion, answer):
    """Hangs for a completion that says so, in a call that no signal interrupts."""
    if completion.startswith("hang"):
        re.match(r"(a|a|b?)*c", "a" * 40)  # holds the interpreter's lock
    return 1.0


def dies(completion, answer):
    if completion == "die":
        os._exit(7)
    print("what a reward prints is no output of the program")
    return 1.0


def takes_all(completion, **columns):
    return float(len(columns["messages"]) + columns["level"] + (columns["answer"] == "7"))


def counts_tokens(completion, sample):
    return float(
        len(sample.token_ids) + 100 * sample.index + 1000 * (sample.finish_reason == "length")
    )


def ranks(prompts, completions, answer, level):
    """Batch form, as in TRL: a list of numbers from lists of columns."""
    assert len(completions) == len(prompts) == len(answer) == len(level)
    assert prompts[0][-1]["role"] == "user" and completions[0][0]["role"] == "assistant"
    texts = [completion[0]["content"] for completion in completions]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    return [float(order.index(i)) for i in range(len(texts))]


def count_ids(completions, completion_ids, **columns):
    """Batch form with TRL's names: text where the prompt is text."""
    return [
        len(ids) + 10 * len(text) for text, ids in zip(completions, completion_ids, strict=True)
    ]


def if_long(completion, answer):
    """Does not apply to short completions."""
    return len(completion) > 3 if len(completion) > 1 else None


def too_few(completions, **columns):
    return [1.0]


def some_fail(completions, answer):
    return [None if text[0]["content"] == "none" else 2.0 for text in completions]


async def waits(completion, answer):
    await asyncio.sleep(float(completion))
    return 1.0


_running = []


async def meets(completion, answer):
    """Ends once so many calls have begun as the completion says."""
    _running.append(completion)
    while len(_running) < int(completion):
        await asyncio.sleep(0.01)
    return 1.0


class Client:
    """Answers one request at a time, in a task that waits for the next one, as a connection is."""

    def __init__(self):
        self.turn, self.requests, self.task = asyncio.Semaphore(1), asyncio.Queue(), None

    async def ask(self, value):
        if self.task is None:
            self.task = asyncio.create_task(self.serve())
        async with self.turn:
            reply = asyncio.get_running_loop().create_future()
            await self.requests.put((value, reply))
            await asyncio.wait({reply, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise ConnectionError("the connection is closed")
            return reply.result()

    async def serve(self):
        while True:
            value, reply = await self.requests.get()
            await asyncio.sleep(0.001)
            reply.set_result(value)


client = Client()  # which all calls share


async def asks(completion, answer):
    return await client.ask(float(completion))


def chars(completion):
    return float(len(completion))


def lengths(completions, sample):
    """Batch form: 1 for the shortest of the group."""
    sizes = [len(facts.token_ids) for facts in sample]
    return [float(size == min(sizes)) for size in sizes]


async def slow_coin(completion, answer):
    return await client.ask(float(zlib.crc32(f"{completion}|{answer}".encode()) % 2))


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl's functions are."""
    assert data_source == "math_dapo" and extra_info == {"index": "1"}
    return {"score": float(solution_str == ground_truth), "acc": True}


def starts_slowly(completion, answer, _loaded=[]):  # noqa: B006
    """Takes a second in its first call in a process, as one that imports a library there."""
    if not _loaded:
        time.sleep(1.0)
        _loaded.append(True)
    return 1.0


def starts_a_process(completion, answer):
    """Waits for a process of its own, whose id it writes to the file that the answer names."""
    process = subprocess.Popen(["sleep", "600"])
    with open(answer, "w") as file:
        file.write(str(process.pid))
    if completion == "die":
        os._exit(7)
    process.wait()
    return 1.0
