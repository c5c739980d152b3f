"""Problems to be rewarded, demonstrations to be imitated, their order, and a tokenizer for them.

Two tasks. `gsm8k` reads JSON lines with `question` and `answer` (worked, ending in `#### n`).
`sums` is generated: add a few numbers below 100, worked one by one.

    prompt    4+17+9+30=
    response  " so 4+17=21; then 21+9=30; add 30+30=60; #### 60"

The demonstrator of `sums` is unreliable on purpose, so that a policy that imitates it has something
left to learn from rewards: it picks its connectives at random, it sometimes gets a step wrong
(probability `slip`: a forgotten carry, or off by one or ten) and then goes on honestly from the
wrong number, and it sometimes skips the working and guesses (probability `impatience`).

Problem `i` of a split is a function of (seed, split, i) and of nothing else. Which split a question
belongs to is decided by the hash of its text, so the splits cannot overlap.
"""

import json
import logging
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specjax.tokenizer import prompt_ids, transformers_class
from train.answers import ANSWER_MARK

TASKS = ("sums", "gsm8k")
SPLITS = ("train", "heldout")

PAD_TOKEN, EOS_TOKEN = "<|pad|>", "<|eos|>"

# One question in so many is held out.
HELDOUT_SHARE = 16

# Common words, each of which becomes one token with its space.
CONNECTIVES = (
    " so", " then", " next", " now", " add", " plus",
    " and", " thus", " hence", " well", " ok", " here",
)  # fmt: skip

# The number of terms falls off geometrically: between 2 and 12 its mean is 5.
_TERMS_DECAY = 0.8

_DEFAULT_TEMPLATES = {"sums": "{question}", "gsm8k": "Question: {question}\nAnswer:"}
_CALCULATOR = re.compile(r"<<[^<>]*>>")

log = logging.getLogger(__name__)


@dataclass
class DataConfig:
    """Where problems and demonstrations come from.

    Attributes:
      task: `sums` (generated), `gsm8k` (JSON lines), or `auto`: the rows of `path` where it is set,
        else `sums`.
      path: training file of `gsm8k`.
      heldout_path: its held-out file; None holds out a sixteenth of `path`, chosen by hash.
      seed: decides generated problems, the demonstrator's whims and the order of training.
      prompt_template: format string with `{question}`; None takes the task's own.
      strip_calculator: drop GSM8K's `<<48/2=24>>` annotations from demonstrations.
      train_size, heldout_size: number of generated problems in each split of `sums`; `heldout_size`
        also caps the held-out problems of `gsm8k`.
      min_terms, max_terms: how many numbers `sums` adds.
      max_number: the largest of them; the smallest is 1.
      slip: probability that a step of the working is wrong.
      impatience: probability that the demonstrator guesses.
    """

    task: str = "auto"
    path: str | None = None
    heldout_path: str | None = None
    seed: int = 0
    prompt_template: str | None = None
    strip_calculator: bool = True
    train_size: int = 1_000_000
    heldout_size: int = 512
    min_terms: int = 2
    max_terms: int = 12
    max_number: int = 99
    slip: float = 0.08
    impatience: float = 0.3

    def __post_init__(self) -> None:
        if self.task == "auto":
            self.task = "sums" if self.path is None else "gsm8k"
        if self.task not in TASKS:
            raise ValueError(
                f"data.task must be one of auto, {', '.join(TASKS)}, got {self.task!r}"
            )
        for name in ("slip", "impatience"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name} is a probability, got {getattr(self, name)}")
        if not 2 <= self.min_terms <= self.max_terms:
            raise ValueError(
                "expected 2 <= data.min_terms <= data.max_terms, "
                f"got {self.min_terms} and {self.max_terms}"
            )
        if self.max_number < 9 or self.seed < 0 or self.train_size < 1 or self.heldout_size < 1:
            raise ValueError(
                "expected data.max_number >= 9, data.seed >= 0 and sizes >= 1, got "
                f"{self.max_number}, {self.seed}, {self.train_size}, {self.heldout_size}"
            )
        self.format_prompt("")

    @property
    def said(self) -> str:
        """What is trained on, for a line at start."""
        if self.task == "sums":
            return "the embedded task sums, for data.path names no file"
        return f"{self.path} (task {self.task})"

    def format_prompt(self, question: str) -> str:
        """The prompt that a question becomes.

        Raises:
          ValueError: the template has no `{question}`, or other fields.
        """
        template = self.prompt_template
        if template is None:
            template = _DEFAULT_TEMPLATES[self.task]
        try:
            if "{question}" not in template:
                raise KeyError("question")
            return template.format(question=question)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                "data.prompt_template must be a format string whose only field is {question} "
                f"(literal braces doubled), got {template!r}"
            ) from error


@dataclass(frozen=True)
class Problem:
    """A prompt whose response can be checked; `index` is its place in the split."""

    prompt: str
    answer: str
    index: int


@dataclass(frozen=True)
class Demonstration:
    """A prompt with a response to imitate, stop token not included."""

    prompt: str
    response: str


def split_of(question: str) -> str:
    """The split that a question belongs to, from the CRC-32 of its text."""
    return SPLITS[zlib.crc32(question.encode()) % HELDOUT_SHARE == 0]


def problems(cfg: DataConfig, split: str) -> Sequence[Problem]:
    """The problems of a split, `train` or `heldout`, by random access.

    Raises:
      ValueError: unknown split, missing path, or a bad line (named).
      FileNotFoundError: no such file.
    """
    return [p for p, _ in _gsm8k(cfg, split)] if cfg.task == "gsm8k" else _Sums(cfg, split, False)


def demonstrations(cfg: DataConfig, split: str) -> Sequence[Demonstration]:
    """The demonstrations of the same problems, in the same order; raises what `problems` does."""
    return [d for _, d in _gsm8k(cfg, split)] if cfg.task == "gsm8k" else _Sums(cfg, split, True)


def endless(source: Sequence, seed: int):
    """The source in a shuffled order that never ends, reshuffled after every pass.

    Returns:
      A `grain.MapDataset`; item `i` costs the same for every `i`, so the one integer to checkpoint
      is how many items were taken.
    """
    import grain

    if not len(source):
        raise ValueError("expected at least one example to draw from, got an empty source")
    return grain.MapDataset.source(source).shuffle(seed=seed % 2**32).repeat()


def _check_split(split: str) -> str:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
    return split


class _Sums(Sequence):
    """Generated sums: either their problems or their demonstrations."""

    def __init__(self, cfg: DataConfig, split: str, demonstrate: bool) -> None:
        self._cfg, self._split, self._demonstrate = cfg, _check_split(split), demonstrate

    def __len__(self) -> int:
        return self._cfg.train_size if self._split == "train" else self._cfg.heldout_size

    def __getitem__(self, index: int) -> Problem | Demonstration:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of a split of {len(self)}")
        key = [self._cfg.seed, SPLITS.index(self._split), index]
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        terms = draw_terms(self._cfg, rng)
        while split_of(_sum_question(terms)) != self._split:
            terms = draw_terms(self._cfg, rng)
        prompt = self._cfg.format_prompt(_sum_question(terms))
        if self._demonstrate:
            return Demonstration(prompt, demonstrate_sum(self._cfg, terms, rng))
        return Problem(prompt, str(sum(terms)), index)

    def __repr__(self) -> str:
        return f"sums({self._split}, seed={self._cfg.seed}, {len(self)} problems)"


def draw_terms(cfg: DataConfig, rng: np.random.Generator) -> list[int]:
    """Numbers to add: mostly few, sometimes `max_terms` of them."""
    weights = _TERMS_DECAY ** np.arange(cfg.max_terms - cfg.min_terms + 1)
    count = cfg.min_terms + rng.choice(len(weights), p=weights / weights.sum())
    return rng.integers(1, cfg.max_number + 1, count).tolist()


def demonstrate_sum(cfg: DataConfig, terms: Sequence[int], rng: np.random.Generator) -> str:
    """Writes what the unreliable demonstrator would (see the module's docstring)."""
    if rng.random() < cfg.impatience:
        noise = rng.normal(0.0, 0.1 * sum(terms))
        return f" {ANSWER_MARK} {max(round(sum(terms) + noise), 1)}"
    words, total = [], terms[0]
    for term in terms[1:]:
        result = total + term
        if rng.random() < cfg.slip:
            result = _slip(total, term, rng)
        words.append(f"{CONNECTIVES[rng.integers(len(CONNECTIVES))]} {total}+{term}={result};")
        total = result
    return f"{''.join(words)} {ANSWER_MARK} {total}"


def _slip(a: int, b: int, rng: np.random.Generator) -> int:
    if a % 10 + b % 10 >= 10:
        return a + b - 10  # the forgotten carry
    options = [a + b + error for error in (-10, -1, 1, 10) if a + b + error > 0]
    return options[rng.integers(len(options))]


def _sum_question(terms: Sequence[int]) -> str:
    return "+".join(map(str, terms)) + "="


def _gsm8k(cfg: DataConfig, split: str) -> list[tuple[Problem, Demonstration]]:
    """Question and answer pairs of a split, in the order of the file."""
    _check_split(split)
    if not cfg.path:
        raise ValueError("task gsm8k reads a file: set data.path=/path/to/train.jsonl")
    if cfg.heldout_path:
        pairs = read_gsm8k(cfg.heldout_path)
        if split == "train":
            heldout = {question for question, _ in pairs}
            every = read_gsm8k(cfg.path)
            pairs = [pair for pair in every if pair[0] not in heldout]
            if len(pairs) < len(every):
                log.warning(
                    "left out %d questions of %s that %s holds out",
                    len(every) - len(pairs), cfg.path, cfg.heldout_path,
                )  # fmt: skip
    else:
        pairs = [pair for pair in read_gsm8k(cfg.path) if split_of(pair[0]) == split]
    if split == "heldout":
        pairs = pairs[: cfg.heldout_size]
    if not pairs:
        raise ValueError(f"{cfg.path}: no question is left for the split {split!r}; add more lines")
    return [_gsm8k_pair(cfg, i, *pair) for i, pair in enumerate(pairs)]


def _gsm8k_pair(
    cfg: DataConfig, index: int, question: str, worked: str
) -> tuple[Problem, Demonstration]:
    prompt = cfg.format_prompt(question)
    answer = worked.rpartition(ANSWER_MARK)[2].strip()
    response = _CALCULATOR.sub("", worked) if cfg.strip_calculator else worked
    return Problem(prompt, answer, index), Demonstration(prompt, response)


def read_gsm8k(path: str | Path) -> list[tuple[str, str]]:
    """Reads (question, worked answer) pairs from GSM8K-format JSON lines; blank lines are skipped.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is not such a pair, with file, line and remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; expected JSON lines with 'question' and 'answer' "
            "(set data.path and data.heldout_path)"
        )
    pairs = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                pairs.append(_read_pair(line, f"{path}:{number}"))
    if not pairs:
        raise ValueError(f"{path}: the file is empty; expected one JSON object per line")
    return pairs


def _read_pair(line: bytes, place: str) -> tuple[str, str]:
    expected = 'expected {"question": "...", "answer": "... #### n"}'
    try:
        record = json.loads(line)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ValueError(f"{place}: not JSON ({error}); {expected}; fix or delete it") from error
    fields = [record.get(k) for k in ("question", "answer")] if isinstance(record, dict) else []
    if len(fields) != 2 or not all(isinstance(f, str) and f.strip() for f in fields):
        raise ValueError(
            f"{place}: 'question' or 'answer' is missing or not text; {expected}, "
            f"got {line[:80]!r}; fix or delete it"
        )
    question, answer = (field.strip() for field in fields)
    if not answer.rpartition(ANSWER_MARK)[1] or not answer.rpartition(ANSWER_MARK)[2].strip():
        raise ValueError(
            f"{place}: the answer does not end in '#### n'; {expected}, "
            f"got an answer ending in {answer[-40:]!r}; fix or delete it"
        )
    return question, answer


def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int, out_dir: str | Path):
    """Trains a byte-level BPE tokenizer, digits kept apart, and saves it for `AutoTokenizer`.

    Args:
      texts: training texts; prompts and responses as separate items, since they are encoded apart.
      vocab_size: upper limit, special tokens and the 256 bytes included; few texts give fewer.
      out_dir: receives `tokenizer.json` and `tokenizer_config.json`.

    Returns:
      The `transformers.PreTrainedTokenizerFast`, with `<|pad|>` as id 0 and `<|eos|>` as id 1.

    Raises:
      ValueError: a vocabulary too small for bytes and special tokens.
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


def encode_prompt(tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt: the same in training, in rollouts, and for whoever generates."""
    return prompt_ids(tokenizer, prompt)


def encode_demonstration(tokenizer, demonstration: Demonstration) -> tuple[list[int], list[int]]:
    """(prompt ids, response ids with the stop token), encoded apart so that no merge joins them."""
    response = tokenizer.encode(demonstration.response, add_special_tokens=False)
    prompt = encode_prompt(tokenizer, demonstration.prompt)
    return prompt, [*response, tokenizer.eos_token_id]
