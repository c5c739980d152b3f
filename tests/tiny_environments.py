"""Environments for runs of a tiny policy, whose messages are noise; workers import them."""

import os
import time
import zlib

from train.environments.tools import ToolEnvironment


class Talk:
    """Answers every message until its checksum ends the sample; sees if a turn is lost or twice."""

    def __init__(self):
        self.heard = []

    def reset(self, row):
        self.heard = []
        return [{"role": "user", "content": row["prompt"]}]

    def restore(self, messages):
        self.heard = list(messages)

    async def step(self, messages):
        time.sleep(float(os.environ.get("TINY_RUN_REWARD_SECONDS", "0")))
        if self.heard and messages[:-1] != self.heard:
            raise RuntimeError(f"expected the conversation {self.heard}, got {messages}")
        value = zlib.crc32(repr(messages).encode())
        answers = [{"role": "tool", "content": f" {value % 97};"}]
        self.heard = [*messages, *answers]
        return answers, float(value % 3 == 0), value % 5 == 0


class Forgetful(Talk):
    """One that cannot be restored, and hangs for some messages."""

    restore = property()

    async def step(self, messages):
        if len(messages) == 4 and zlib.crc32(repr(messages[0]).encode()) % 3 == 0:
            time.sleep(100)
        return await super().step(messages)


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a + b


class Adder(ToolEnvironment):
    """The tool `add`."""

    functions = (add,)

    def judge(self, text, row):
        return float(row["answer"] in text)
