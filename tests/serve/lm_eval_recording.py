"""Records what lm-eval asks a server, and what its `hf` backend finds on the same checkpoint.

    python tests/serve/lm_eval_recording.py make DIR
    python -m serve --model DIR/model speculation.strategy=off port=8765
    python tests/serve/lm_eval_recording.py record DIR http://127.0.0.1:8765

The first writes checkpoint and task. The last needs an environment with torch, transformers, and
lm-eval 0.4.13 with its `api` and `hf` extras. It fails where the two backends differ, and writes
lm_eval_recording.json beside this file, which test_lm_eval.py replays without any of these.
"""

from __future__ import annotations

import json
import shutil
import string
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden" / "qwen3"
RECORDING = HERE / "lm_eval_recording.json"
CLOSE = 1e-3  # of log-likelihoods

TASK = """task: likely_words
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
  - metric: acc_norm
"""
DOCUMENTS = (
    ("one and one are", ("two", "three", "many"), 0),
    ("the sea is", ("blue", "a long way from here", "dry"), 0),
    ("2 + 3 =", ("5", "23"), 0),
    ("a cat has", ("4 legs", "wings", "no tail", "keys"), 0),
    ("", ("nothing was asked", "so nothing is said"), 1),
)


def write_checkpoint(folder: Path) -> Path:
    """The golden Qwen3 checkpoint with a tokenizer of one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(GOLDEN, folder, ignore=shutil.ignore_patterns("*.npz"))
    special = ["<unk>", "<s>", "</s>", "<end>"]
    letters = [*string.ascii_lowercase, *string.digits, *" .,;:?!+-*/=()<>'\"_#%&"]
    vocabulary = {piece: i for i, piece in enumerate([*special, *letters][:64])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def write_task(folder: Path) -> Path:
    """A task of multiple choices, as a file of rows and what lm-eval is told of them."""
    folder.mkdir(parents=True)
    rows = [{"question": q, "choices": list(c), "label": label} for q, c, label in DOCUMENTS]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "likely_words.yaml").write_text(TASK.format(file=file))
    return folder


def record(folder: Path, base: str) -> None:
    """Evaluates with both backends, compares them, and writes what was asked and found."""
    import lm_eval
    import requests
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    asked, lengths, found = [], [], {}
    send, parse, score = (
        requests.Session.request,
        LocalCompletionsAPI.parse_logprobs,
        HFLM._loglikelihood_tokens,
    )

    def sending(self, method, url, **options):
        if url.startswith(base):
            asked.append({"method": method.upper(), "path": url[len(base) :]})
            if options.get("json") is not None:
                asked[-1]["json"] = options["json"]
        return send(self, method, url, **options)

    def parsing(outputs, tokens=None, ctxlens=None, **options):
        lengths.append(list(ctxlens))
        return parse(outputs, tokens=tokens, ctxlens=ctxlens, **options)

    def scoring(self, wanted, *given, **options):
        results = score(self, wanted, *given, **options)
        for (_, context, continuation), result in zip(wanted, results, strict=True):
            found[tuple(context + continuation)] = [result[0], bool(result[1])]
        return results

    requests.Session.request = sending
    LocalCompletionsAPI.parse_logprobs = staticmethod(parsing)
    HFLM._loglikelihood_tokens = scoring
    manager = TaskManager(include_path=str(folder / "task"))
    options = {
        "tasks": ["likely_words"], "task_manager": manager, "batch_size": 3,
        "bootstrap_iters": 0, "log_samples": True,
    }  # fmt: skip
    over_http = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"base_url": f"{base}/v1/completions", "model": "model", "max_length": 128},
        **options,
    )
    directly = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        **options,
    )
    worst = 0.0
    for ours, theirs in zip(
        *(r["samples"]["likely_words"] for r in (over_http, directly)), strict=True
    ):
        for mine, other in zip(ours["resps"], theirs["resps"], strict=True):
            (value, greedy), (right, is_greedy) = mine[0], other[0]
            worst = max(worst, abs(float(value) - float(right)))
            assert str(greedy) == str(is_greedy), (ours["doc"], mine, other)
    print("the backends differ by", worst, "at most;", over_http["results"]["likely_words"])
    assert worst < CLOSE, worst
    assert (
        over_http["results"]["likely_words"]["acc,none"]
        == directly["results"]["likely_words"]["acc,none"]
    )
    scored = [one for one in asked if one.get("json", {}).get("echo")]
    for one, contexts in zip(scored, lengths, strict=True):
        one["context_lengths"] = contexts
        one["loglikelihoods"] = [found[tuple(prompt)] for prompt in one["json"]["prompt"]]
    text = ",\n".join(json.dumps(one) for one in asked)
    RECORDING.write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    command, place = sys.argv[1], Path(sys.argv[2]).resolve()
    if command == "make":
        write_checkpoint(place / "model")
        write_task(place / "task")
    else:
        record(place, sys.argv[3].rstrip("/"))
