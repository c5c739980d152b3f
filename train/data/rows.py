"""Problems for RL and demonstrations for SFT, their order and their token ids.

They are generated (`train.data.tasks.sums`), or rows of files (`train.data.tasks.files`). The
columns of a row decide its task (`train.data.tasks`). The hash of a question decides its split, so
the splits cannot overlap.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.config import ModelConfig
from specjax.interfaces import Task
from specjax.tokenizer import (
    chat_text,
    decode,
    has_chat_template,
    prompt_ids,
    reads_date,
    require_template_options,
    template_variables,
    transformers_class,
    with_tokenizer_end,
)
from train.answers.extract import each_gold
from train.data import tasks
from train.data.tasks import reasoning_gym, sums
from train.data.tasks.files import find_files, read_rows
from train.data.tasks.layout import (
    PARTS,
    REASONING,
    Demonstration,
    Example,
    Message,
    Problem,
    Response,
    Row,
    RowError,
    Unread,
    check_split,
    split_of,
    text_of_response,
    tools_of,
)
from train.data.tasks.prompt import keyed
from train.registry import SUMS_REWARD
from train.schema import GENERATED, REASONING_GYM, DataConfig, fill_template

PAD_TOKEN, EOS_TOKEN = "<|pad|>", "<|eos|>"

_CALCULATOR = re.compile(r"<<[^<>]*>>")

log = logging.getLogger(__name__)


class EmptySplitError(ValueError):
    """A split has no rows."""


# --- problems and demonstrations -----------------------------------------------------------------


def problems(
    cfg: DataConfig, split: str, chat: bool = False, held_out: int = 0
) -> Sequence[Problem]:
    """The problems of a split, `train` or `heldout`, by random access.

    Args:
      cfg: settings of the data.
      split: name of the split.
      chat: whether prompts will be messages of a conversation (`uses_chat`); the question alone is
        then the message, unless the settings have a template.
      held_out: number of generated problems that are held out, if more than `cfg.heldout_size`.

    Raises:
      ValueError: the split is unknown, the path is missing, no task knows the rows, or a row cannot
        be read.
      FileNotFoundError: the file does not exist.
    """
    task = find_task(cfg)
    if cfg.task == REASONING_GYM:
        given = cfg.prompt_template or ("{question}" if chat else reasoning_gym.TEMPLATE)
        return reasoning_gym.Generated(cfg, split, given, held_out)
    if task is None:
        return sums.Sums(cfg, split, False)
    rows = []
    for i, (place, example) in enumerate(_examples(cfg, task, split)):
        unread = example.answer if isinstance(example.answer, Unread) else None
        answer, prompt = "" if unread else example.answer, prompt_of(cfg, task, example, chat)
        rows.append(Problem(prompt, answer, i, place, example.columns, example.row, unread))
    return rows


def demonstrations(cfg: DataConfig, split: str, chat: bool = False) -> Sequence[Demonstration]:
    """The demonstrations of a split's problems, in the order of `problems`.

    Raises:
      ValueError: a row has no demonstration, and as in `problems`.
      FileNotFoundError: the file does not exist.
    """
    task = find_task(cfg)
    if cfg.task == REASONING_GYM:
        raise ValueError(
            "data.task=reasoning_gym has no worked answers to imitate; set data.path to rows with "
            "some"
        )
    if task is None:
        return sums.Sums(cfg, split, True)
    rows = []
    for place, example in _examples(cfg, task, split):
        response = response_of(example, task, place, "there is nothing to imitate")
        if cfg.strip_calculator and task.name == "gsm8k":
            response = _CALCULATOR.sub("", response)
        prompt = prompt_of(cfg, task, example, chat)
        rows.append(Demonstration(prompt, response, tools_of(example.row), place))
    return rows


def response_of(example: Example, task: Task, place: str, otherwise: str) -> Response:
    """The demonstration of a row.

    Args:
      example: the row.
      task: task that read it.
      place: place of the row, for messages.
      otherwise: what to do without one, for messages.

    Raises:
      ValueError: the row has none, an empty one, or one that cannot be read.
    """
    response = example.response
    if isinstance(response, Unread):
        raise ValueError(f"{place}: {response.why}; fix or delete the row")
    if response is None:
        raise ValueError(
            f"{place}: a row of task {task.name} without a demonstration (a worked answer, a "
            f"completion, or a last message of the assistant); {otherwise}"
        )
    if not text_of_response(response).strip() and not {*PARTS} & {*response}:
        raise ValueError(
            f"{place}: the demonstration is empty, so that the end token alone would be imitated; "
            "delete the row, or fill in its answer"
        )
    return response


def find_task(cfg: DataConfig) -> Task | None:
    """The task of the rows of `cfg.path`; None if problems are generated.

    Raises:
      ValueError: no task has the columns of the first row, or a path is missing.
      FileNotFoundError: a file does not exist.
    """
    if cfg.task in GENERATED or (cfg.task == "auto" and not cfg.path):
        if cfg.heldout_path:
            raise ValueError(
                f"data.heldout_path={cfg.heldout_path} goes with data.path, which is not set; "
                "the generated task holds out problems of its own"
            )
        return None
    cfg.require_path()
    return _task_of(cfg, cfg.path)


def _task_of(cfg: DataConfig, path: str | Sequence[str]) -> Task:
    """The task of the rows of a path, by the settings or the columns of the first row."""
    if cfg.prompt_key or cfg.answer_key:
        return keyed(cfg.prompt_key, cfg.answer_key)
    return tasks.find_task(cfg.task) if cfg.task != "auto" else recognise_file(path)


def recognise_file(path: str | Path | Sequence[str]) -> Task:
    """The task of the rows of a file, or of several, by the columns of the first one.

    Raises:
      ValueError: there are no rows, or no task knows these columns.
    """
    _, row = next(read_rows(path), (None, None))
    if row is None:
        raise ValueError(f"{path}: the file is empty; expected one row per problem")
    task = tasks.recognise(row)
    if task is None:
        raise ValueError(
            f"{path}: cannot tell what its rows mean: the columns are "
            f"{', '.join(row) or '(none)'}, and the tasks known are {tasks.known_tasks()}; "
            "name two of them as data.prompt_key and data.answer_key, or set data.task to "
            "module:attribute, a task of your own"
        )
    return task


def default_reward(cfg: DataConfig) -> str:
    """The name of the reward that suits the answers."""
    task = find_task(cfg)
    if cfg.task == REASONING_GYM:
        return reasoning_gym.REWARD
    return SUMS_REWARD if task is None else task.reward


class Table(NamedTuple):
    """The rows of a file, or of several.

    Attributes:
      examples: the rows, each with its place in its file for messages.
      duplicates: number of rows whose prompt and answer an earlier row has; they are among the
        examples unless they were dropped.
    """

    examples: list[tuple[str, Example]]
    duplicates: int


def read_table(path: str | Path | Sequence[str], task: Task, duplicates: str = "keep") -> Table:
    """Reads all rows of a file, or of all files that paths stand for (`train.data.tasks.files`).

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: there are no rows, or the task cannot read one; the message names it.
    """
    files = find_files(str(path) if isinstance(path, Path) else path)
    stamps = tuple(map(_stamp, files))
    return _read_table(tuple(map(str, files)), stamps, _Identity(task), duplicates)


def _stamp(file: Path) -> tuple[int, int] | None:
    """Changes with the content of a file; None if there is none that can be read."""
    try:
        status = file.stat()
    except OSError:  # which reading the file will say
        return None
    return status.st_mtime_ns, status.st_size


def read_row(task: Task, row: Row, place: str) -> Example:
    """Reads a row, whose place is for messages.

    Raises:
      ValueError: the task cannot read it, and the message names another task that can; or the
        column `tools` cannot be read.
    """
    try:
        tools_of(row)
    except RowError as error:
        raise ValueError(f"{place}: {error}") from error
    try:
        return task.read(row)
    except RowError as error:
        other = tasks.other_reader(task, row)
        remedy = f"set data.task={other.name}, which reads such rows, or " if other else ""
        raise ValueError(
            f"{place}: {error}; read as task {task.name} ({task.columns}), the row has the columns "
            f"{', '.join(row)}; {remedy}fix or delete it"
        ) from error


class _Identity:
    """A task that equals itself alone, for a user's own need not be hashable."""

    def __init__(self, task: Task):
        self.task = task

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.task is other.task

    def __hash__(self) -> int:
        return id(self.task)


@functools.lru_cache(maxsize=2)  # for both splits of a file, or two files
def _read_table(paths: tuple[str, ...], stamps: Any, identity: _Identity, duplicates: str) -> Table:
    task, examples, seen, repeated = identity.task, [], {}, 0
    for place, row in read_rows(paths):
        example = dataclasses.replace(read_row(task, row, place), row=row)
        answer = example.answer
        told = repr(answer.value) if isinstance(answer, Unread) else each_gold(answer)
        key = (question_of(example.prompt), told)
        known = seen.setdefault(key, example)
        if known is not example:
            repeated += 1
            if duplicates == "drop":
                continue
            # What is equal is stored once in memory.
            stored = {name: value for name, value in known.row.items() if row.get(name) == value}
            example = dataclasses.replace(example, prompt=known.prompt, row={**row, **stored})
        examples.append((place, example))
    if not examples:
        raise ValueError(f"{', '.join(paths)}: the file is empty; expected one row per problem")
    return Table(examples, repeated)


def question_of(prompt: str | Sequence[Message]) -> str:
    """The text of a prompt, which identifies duplicates and decides the split."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {_text_of_message(message)}" for message in prompt)


def _text_of_message(message: Message) -> str:
    """The content of a message, or the calls of one that has no content."""
    calls = message.get("tool_calls")
    return message.get("content") or (json.dumps(calls, sort_keys=True) if calls else "")


def asked_by(problem: Problem) -> str:
    """The question of a problem without a template, if it is generated; else its prompt's text."""
    entry = problem.columns.get("entry") if not problem.place else None
    return entry["question"] if entry else question_of(problem.prompt)


def _examples(cfg: DataConfig, task: Task, split: str) -> list[tuple[str, Example]]:
    """The rows of a split, in the order of the file."""
    check_split(split)
    every = read_table(cfg.path, task, cfg.duplicates).examples
    if cfg.heldout_path:
        heldout_task = _task_of(cfg, cfg.heldout_path)
        rows = read_table(cfg.heldout_path, heldout_task, cfg.duplicates).examples
        if split == "train":
            heldout = {question_of(example.prompt) for _, example in rows}
            rows = [row for row in every if question_of(row[1].prompt) not in heldout]
            if len(rows) < len(every):
                log.warning(
                    "left out %d questions of %s that %s holds out",
                    len(every) - len(rows), cfg.named, cfg.heldout_path,
                )  # fmt: skip
    else:
        rows = [row for row in every if split_of(question_of(row[1].prompt)) == split]
    if split == "heldout":
        rows = rows[: cfg.heldout_size]
    if not rows:
        raise EmptySplitError(
            f"{cfg.named}: no question is left for the split {split!r}; add more rows, or set "
            "data.heldout_path"
        )
    return rows


def prompt_of(
    cfg: DataConfig, task: Task, example: Example, chat: bool
) -> str | tuple[Message, ...]:
    """The prompt of a row: its question in the template, or its conversation.

    Raises:
      ValueError: there is a template, and the prompt is a conversation.
    """
    if not isinstance(example.prompt, str):
        if cfg.prompt_template is not None:
            raise ValueError(
                "data.prompt_template is for prompts that are text, and those of "
                f"{cfg.named} are conversations; leave it out"
            )
        return example.prompt
    template = cfg.prompt_template
    if template is None:
        template = "{question}" if chat else task.template
    return fill_template(template, example.prompt)


def endless(source: Sequence, seed: int):
    """The source in a shuffled order that never ends, reshuffled after every pass.

    Returns:
      A `grain.MapDataset`. Item `i` costs the same for every `i`, so a checkpoint needs only the
      number of items taken.
    """
    import grain

    if not len(source):
        raise ValueError("expected at least one example to draw from, got an empty source")
    return grain.MapDataset.source(source).shuffle(seed=seed % 2**32).repeat()


# --- tokens --------------------------------------------------------------------------------------


def uses_chat(cfg: DataConfig, tokenizer) -> bool:
    """Whether prompts that are text become messages of a conversation.

    Raises:
      ValueError: the settings need a chat template, and the tokenizer has none; or the template
        does not read the arguments in the settings.
    """
    has_template = has_chat_template(tokenizer)
    if not has_template and (cfg.chat == "on" or cfg.chat_template_kwargs):
        name = "chat=on" if cfg.chat == "on" else "chat_template_kwargs"
        raise ValueError(f"data.{name}: the model's tokenizer has no chat template")
    try:
        require_template_options(tokenizer, cfg.chat_template_kwargs)
    except ValueError as error:
        raise ValueError(f"data.chat_template_kwargs: {error}") from error
    return has_template and cfg.chat != "off"


def saved_settings(saved: Mapping[str, Any], cfg: DataConfig, tokenizer) -> dict[str, Any]:
    """Returns the settings in a checkpoint without differences that change no prompt.

    These are a date that the chat template does not read, or that is not settled, and options that
    it does not read; earlier versions took such options, and did not keep the date.
    """
    rows = {"date": cfg.date, **saved.get("data", {})}
    if cfg.date is None or not reads_date(tokenizer):
        rows["date"] = cfg.date
    options = rows.get("chat_template_kwargs")
    known = template_variables(tokenizer) if options else None
    if known is not None:
        rows["chat_template_kwargs"] = {n: value for n, value in options.items() if n in known}
    return {**saved, "data": rows}


def prompt_text(
    tokenizer,
    prompt: str | Sequence[Message],
    chat: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    date: str | None = None,
) -> str:
    """The text of a prompt, with the chat template applied to conversations.

    Args:
      tokenizer: tokenizer of the model.
      prompt: text, or a conversation.
      chat: whether a prompt that is text becomes one message of the user.
      template_kwargs: further variables of the template.
      tools: JSON schemas of the functions that may be called.
      date: date that the template may write, as YYYY-MM-DD; None for today's.

    Raises:
      ValueError: the tokenizer has no template for a conversation, or it refuses this one, or the
        prompt has tools or calls of tools that no template writes.
    """
    messages = _as_messages(prompt, chat)
    if messages and not has_chat_template(tokenizer):
        raise ValueError(
            "prompts that are conversations need a chat template, and the model's tokenizer has "
            "none; use the instruct model's tokenizer files, or rows whose prompts are text"
        )
    render = functools.partial(chat_text, tokenizer, options=template_kwargs, date=date)
    text = render(messages, tools=tools) if messages else prompt
    if tools and not (messages and _differs(text, render, messages)):
        raise ValueError(
            "the row has a column `tools`, and no chat template writes it; delete or rename the "
            "column, write the tools into a message, or use a model whose template does"
        )
    if any("tool_calls" in message for message in messages):
        without = [_without(message, "tool_calls") for message in messages]
        if not _differs(text, render, without, tools=tools):
            raise ValueError(
                "the prompt has messages with `tool_calls`, and the chat template does not write "
                "them; write them into the content, or use a model whose template does"
            )
    return text


def _as_messages(prompt: str | Sequence[Message], chat: bool) -> Sequence[Message]:
    """A conversation, or a text as one message of the user; empty for text without a template."""
    if not isinstance(prompt, str):
        return prompt
    return [{"role": "user", "content": prompt}] if chat else []


def _without(message: Message, *names: str) -> Message:
    return {key: value for key, value in message.items() if key not in names}


def _differs(text: str, render: Callable[..., str], messages: Sequence[Message], **options) -> bool:
    """Whether a template writes other messages in another way, or refuses them."""
    try:
        return render(messages, **options) != text
    except ValueError:
        return True


def encode_prompt(
    tokenizer,
    prompt: str | Sequence[Message],
    chat: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    date: str | None = None,
) -> list[int]:
    """Token ids of a prompt, the same in training, rollouts and generation.

    Arguments and errors are those of `prompt_text`. A chat template writes all special tokens.
    """
    text = prompt_text(tokenizer, prompt, chat, template_kwargs, tools, date)
    if isinstance(prompt, str) and not chat:
        return prompt_ids(tokenizer, text)
    return list(tokenizer.encode(text, add_special_tokens=False))


class Encoded(NamedTuple):
    """A demonstration as token ids.

    Attributes:
      prompt: ids of the prompt, as generation reads it.
      response: ids of the response, with the token that ends it.
      dropped: keys of the assistant's message that are not imitated, because the chat template does
        not write them.
    """

    prompt: list[int]
    response: list[int]
    dropped: tuple[str, ...] = ()


def encode_demonstration(
    tokenizer,
    demonstration: Demonstration,
    chat: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    ends: Sequence[int] | None = None,
    date: str | None = None,
) -> Encoded:
    """Encodes a prompt and what is imitated after it.

    In a conversation that is what the chat template writes of the assistant's message beyond the
    prompt that generation reads. The ids are those of the whole text, up to the first token that
    ends the response, which is added if there is none. A token of the whole text may hold the end
    of the prompt and the beginning of the response. Generation cannot sample it, because it begins
    after the last token of the prompt. Then the ids of the prompt are those that generation reads,
    and the response is encoded by itself (`_continuation`).

    Args:
      tokenizer, chat, template_kwargs, date: see `prompt_text`.
      demonstration: the demonstration.
      ends: ids that end a response, of which the first is added; None for `end_tokens`.

    Raises:
      ValueError: see `prompt_text` and `end_tokens`; or nothing would be imitated.
    """
    ends = end_tokens(tokenizer) if ends is None else ends
    prompt, response = demonstration.prompt, demonstration.response
    context = prompt_text(tokenizer, prompt, chat, template_kwargs, demonstration.tools, date)
    context_ids = list(tokenizer.encode(context, add_special_tokens=False))
    messages = _as_messages(prompt, chat)
    if messages:
        render = functools.partial(
            chat_text, tokenizer, options=template_kwargs, tools=demonstration.tools, date=date
        )
        text, dropped = _written(render, messages, response, context)
    else:
        text, dropped = text_of_response(response), _keys(response)
    whole = list(tokenizer.encode(context + text, add_special_tokens=False))
    size = len(context_ids)
    rest = whole[size:] if whole[:size] == context_ids else _continuation(tokenizer, text)
    imitated = _ended(tokenizer, rest, ends)
    has_content = text_of_response(response).strip() or {*PARTS} & {*_keys(response)} - {*dropped}
    if len(imitated) < 2 or not has_content:
        raise ValueError(
            "the end token alone would be imitated: the demonstration is empty, or the chat "
            f"template writes nothing of its {', '.join(dropped) or 'content'}; delete the row"
        )
    return Encoded(context_ids if messages else prompt_ids(tokenizer, context), imitated, dropped)


def _keys(response: Response) -> tuple[str, ...]:
    """The keys of a response that is a message, beside role and content."""
    return () if isinstance(response, str) else tuple(_without(response, "role", "content"))


def _written(
    render: Callable[..., str], messages: Sequence[Message], response: Response, context: str
) -> tuple[str, tuple[str, ...]]:
    """Returns what a chat template writes of a response, and the keys that are not imitated.

    Args:
      render: function that applies the template to messages.
      messages: the messages of the prompt.
      response: the response.
      context: text of the prompt.

    Raises:
      ValueError: reasoning or calls of the response cannot be told from the prompt.
    """
    message = {"role": "assistant", "content": response} if isinstance(response, str) else response
    content = message.get("content", "")
    render = functools.partial(render, add_generation_prompt=False)
    whole = render([*messages, message])
    if not whole.startswith(context):
        if parts := [name for name in PARTS if name in message]:
            raise ValueError(
                f"the assistant's message has {', '.join(parts)}, and what the chat template "
                "writes of the conversation does not begin with the prompt that generation reads; "
                "change data.chat_template_kwargs, or write them into the content"
            )
        return _without_opened_tag(content, context), _keys(response)
    dropped = []
    for name in _keys(response):
        names = REASONING if name in REASONING else (name,)
        if not _differs(whole, render, [*messages, _without(message, *names)]):
            dropped.append(name)
    text = whole[len(context) :]
    if "".join(content.split()) not in "".join(text.split()):
        dropped.append("content")
    # Sampling ends with the answer, and not with the spaces that the template writes after it.
    spaces, written_spaces = (t[len(t.rstrip()) :] for t in (content, text))
    return text.rstrip() + (spaces if written_spaces.startswith(spaces) else ""), tuple(dropped)


def _without_opened_tag(content: str, context: str) -> str:
    """Removes from content the tag that a prompt ends with, such as `<think>`, and its spaces."""
    opened = re.search(r"(<[^<>/\s][^<>\s]*>)(\s*)\Z", context)
    if opened is None or not content.lstrip().startswith(opened[1]):
        return content
    return content.lstrip().removeprefix(opened[1]).removeprefix(opened[2])


def _continuation(tokenizer, text: str) -> list[int]:
    """Encodes a text without the space that some tokenizers put before a first word."""
    for before in ("\n", "a"):
        head = tokenizer.encode(before, add_special_tokens=False)
        ids = tokenizer.encode(before + text, add_special_tokens=False)
        if ids[: len(head)] == head:
            return list(ids[len(head) :])
    return list(tokenizer.encode(text, add_special_tokens=False))


def _ended(tokenizer, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Cuts a response after the first token that ends it, or adds one."""
    last = len(ids)
    while last and (ids[last - 1] in ends or not decode(tokenizer, [ids[last - 1]], False).strip()):
        last -= 1
    first = next((i for i in range(last, len(ids)) if ids[i] in ends), None)
    return [*ids, ends[0]] if first is None else [*ids[: first + 1]]


def end_tokens(tokenizer, model: ModelConfig | None = None) -> tuple[int, ...]:
    """The ids that end a response, first the one that demonstrations end with.

    That is the tokenizer's, or the model's if the model does not know the tokenizer's.

    Raises:
      ValueError: neither names an end-of-sequence token.
    """
    end = tokenizer.eos_token_id
    if model is None:
        known = () if end is None else (end,)
    else:
        known = with_tokenizer_end(model, tokenizer).eos_token_ids
    if not known:
        raise ValueError(
            "neither config.json nor the tokenizer names an end-of-sequence token to end "
            "demonstrations with; set eos_token_id in config.json"
        )
    return (end, *(token for token in known if token != end)) if end in known else known


def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int, out_dir: str | Path):
    """Trains a byte-level BPE tokenizer with single digits, and saves it for `AutoTokenizer`.

    Args:
      texts: training texts; prompts and responses are separate items, as they are encoded.
      vocab_size: largest size of the vocabulary, special tokens and the 256 bytes included.
      out_dir: directory for `tokenizer.json` and `tokenizer_config.json`.

    Returns:
      The `transformers.PreTrainedTokenizerFast`, with `<|pad|>` as id 0 and `<|eos|>` as id 1.

    Raises:
      ValueError: the vocabulary is too small for bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [PAD_TOKEN, EOS_TOKEN]
    if vocab_size < 256 + len(special):
        raise ValueError(
            f"vocab_size must be at least {256 + len(special)} (256 bytes and {len(special)} "
            f"special tokens), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = transformers_class("PreTrainedTokenizerFast")(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(out_dir)
    # transformers 5 writes a class name that 4 does not know; both know this one.
    config_path = Path(out_dir) / "tokenizer_config.json"
    config = json.loads(config_path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return fast
