"""`specjax convert`: no bit is lost, nothing overwritten, nothing half-written looks complete."""

import contextlib
import json
import resource
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import tiny_run

from serve.admin import read_weights
from serve.cli.main import main
from specjax import LLM, RunConfig, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.format import named_leaves
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import load_model, load_weights
from specjax.command_line import parse_config
from specjax.drafts.mtp import init_head_params
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from train import rl
from train.heads.files import starting_head
from train.run.start import save
from train.schema import RLConfig

MIMO = dense_config(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=64, eos_token_ids=(2, 3), model_type="mimo", qkv_bias=True,
    qk_norm=False, tie_embeddings=False, mtp_num_layers=1, mtp_concat="hidden_first",
    run=RunConfig(param_dtype="bfloat16", compute_dtype="bfloat16"),
)  # fmt: skip


@pytest.fixture
def convert(capsys):
    """Runs `specjax convert`; (status, output, errors)."""

    def call(*arguments):
        return main(["convert", *map(str, arguments)]), *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    """Another family, in bfloat16, with a head among its own weights and no tokenizer."""
    path = tmp_path_factory.mktemp("convert") / "mimo"
    trees = init_params(MIMO, 0), init_head_params(MIMO, 1)
    trees = jax.tree.map(lambda x: (x + 0.1).astype("bfloat16"), trees)
    hf.save_checkpoint(path, MIMO, *trees)
    return path


def tensors(path: Path) -> dict:
    """Name -> dtype, shape and bytes, of all safetensors files of a directory."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safetensors.safe_open(file, "numpy") as weights:
            found[file.name] = weights.metadata()
            for name in weights.keys():  # noqa: SIM118
                array = weights.get_tensor(name)
                found[file.name, name] = str(array.dtype), array.shape, array.tobytes()
    return found


def assert_same_directory(one: Path, other: Path):
    assert tensors(one) and tensors(one) == tensors(other)
    rest, others = (
        {file.relative_to(path): file.read_bytes() for file in path.rglob("*")
         if file.is_file() and file.suffix != ".safetensors"}
        for path in (one, other)
    )  # fmt: skip
    assert rest == others


def assert_same_trees(one, other):
    one, other = named_leaves(one), named_leaves(other)
    assert one.keys() == other.keys() and one
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), name)


@pytest.mark.parametrize("family", ["tiny", "mimo"])
def test_hugging_face_to_orbax_and_back_is_the_same_to_the_bit(
    family, thin_policy, mimo, convert, tmp_path
):
    source = shutil.copytree({"tiny": thin_policy, "mimo": mimo}[family], tmp_path / "source")
    if family == "tiny":  # what some tokenizers have beside the usual files
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
        (source / "vocab.txt").write_text("a\n")
    status, said, _ = convert(source, tmp_path / "run")
    assert status == 0 and "Orbax, step 0" in said and ("tokenizer" in said) == (family == "tiny")
    assert convert(tmp_path / "run", tmp_path / "back")[0] == 0
    assert_same_directory(source, tmp_path / "back")


@pytest.mark.slow
def test_a_tied_model_with_a_head_of_its_own_keeps_both_and_says_so(
    thin_policy, convert, tmp_path, caplog
):
    source = tmp_path / "source"
    shutil.copytree(thin_policy, source)
    weights = safetensors.numpy.load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
    safetensors.numpy.save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert convert(source, tmp_path / "run")[0] == 0
    assert "tie_word_embeddings is true" in caplog.text
    caplog.clear()
    assert convert(tmp_path / "run", tmp_path / "back")[0] == 0
    assert tensors(tmp_path / "back") == tensors(source)
    cfg, params, _ = hf.load_checkpoint(tmp_path / "back")
    assert not cfg.tie_embeddings and not caplog.text
    assert_same_trees(params, hf.load_checkpoint(source)[1])
    # Text, too, is that of the head in the file.
    one, other = (
        LLM(path, SpecConfig(strategy="off"), max_batch=1, max_len=32)
        for path in (source, tmp_path / "run")
    )
    asked = [5, 6, 7], SamplingParams(seed=0, max_tokens=8, ignore_eos=True)
    tied = LLM(thin_policy, SpecConfig(strategy="off"), max_batch=1, max_len=32)
    token_ids = [llm.generate(*asked)[0].samples[0].token_ids for llm in (one, other, tied)]
    assert token_ids[0] == token_ids[1] != token_ids[2]


def test_what_is_written_is_what_llm_the_server_and_training_load(thin_policy, convert, tmp_path):
    run, head = tmp_path / "run", tmp_path / "head"
    assert convert(thin_policy, run)[0] == convert(thin_policy, head, "--what", "head")[0] == 0
    there = hf.load_checkpoint(thin_policy)
    model = load_model(run)  # what LLM does
    assert model.cfg == there[0] and model.tokenizer == run / "tokenizer"
    assert_same_trees((model.policy, model.head.params), there[1:])
    policy, served = read_weights(run, there[0], False, None)  # POST /update_weights
    assert_same_trees((policy, served.params), there[1:])
    assert_same_trees(read_weights(head, there[0], True, None)[1].params, there[2])
    _, started = starting_head(SpecConfig(draft=str(head)), there[0], None, None)  # rollout.draft=
    assert_same_trees(started.params, there[2])


def test_a_run_of_training_to_hugging_face_and_back(thin_policy, convert, tmp_path):
    """A run that starts from an Orbax checkpoint; its own say what they are."""
    start, out = tmp_path / "start", tmp_path / "out"
    assert convert(thin_policy, start)[0] == 0
    cfg, _ = parse_config(RLConfig, tiny_run.arguments(start, out))
    trainer = rl.Trainer(cfg)
    with Checkpointer(out / "checkpoints") as checkpoints:
        for step, factor in ((3, 2.0), (5, 4.0)):
            trainer.done_steps = step
            trainer.params = jax.tree.map(lambda x, f=factor: x * f, trainer.params)
            save(trainer, checkpoints, block=True)
    (out / "metrics.jsonl").write_text("")
    assert convert(out, tmp_path / "three", "--step", "3")[0] == 0
    _, policy, head = hf.load_checkpoint(tmp_path / "three")
    original = hf.load_checkpoint(thin_policy)
    assert_same_trees(policy, jax.tree.map(lambda x: x * 2, original[1]))
    assert_same_trees(head, original[2])
    assert convert(out / "checkpoints", tmp_path / "newest")[0] == 0
    assert_same_trees(hf.load_checkpoint(tmp_path / "newest")[1], trainer.params)
    text = (thin_policy / "tokenizer.json").read_bytes()
    assert (tmp_path / "newest" / "tokenizer.json").read_bytes() == text
    assert convert(tmp_path / "newest", tmp_path / "again")[0] == 0
    once, again = load_weights(out)[:2], load_weights(tmp_path / "again")[:2]
    assert_same_trees(again, once)
    status, _, errors = convert(out, tmp_path / "none", "--step", "4")
    assert status == 1 and "holds no step 4, only [3, 5]" in errors
    status, _, errors = convert(thin_policy, out)
    assert status == 1 and "exists; choose another target" in errors
    assert (out / "metrics.jsonl").exists()


def test_a_head_alone_goes_both_ways(thin_policy, convert, tmp_path):
    asked = ["--what", "head"]
    assert convert(thin_policy, tmp_path / "orbax")[0] == 0
    assert convert(tmp_path / "orbax", tmp_path / "hf", *asked)[0] == 0
    assert [f.name for f in (tmp_path / "hf").iterdir()] == ["mtp.safetensors"]
    wanted = {k: v for k, v in tensors(thin_policy).items() if "mtp" in str(k)}
    assert tensors(tmp_path / "hf") == wanted
    status, _, errors = convert(tmp_path / "hf", tmp_path / "no")
    assert status == 1 and "--like DIR" in errors
    file = tmp_path / "hf" / "mtp.safetensors"
    status, _, errors = convert(file, tmp_path / "no", "--like", thin_policy, "--to", "orbax")
    assert status == 1 and "a head alone is written as a file of safetensors" in errors
    status, _, errors = convert(file, tmp_path / "no", "--what", "policy")
    assert status == 1 and "holds no policy" in errors and not (tmp_path / "no").exists()


def test_the_policy_alone_and_another_dtype(thin_policy, convert, tmp_path):
    status, said, _ = convert(
        thin_policy, tmp_path / "half", "--what", "policy", "--dtype", "bfloat16"
    )
    assert status == 0 and "bfloat16" in said and "head" not in said
    policy, head, _ = load_weights(tmp_path / "half")
    wanted = jax.tree.map(lambda x: x.astype("bfloat16"), hf.load_checkpoint(thin_policy)[1])
    assert head is None
    assert_same_trees(policy, wanted)
    assert convert(tmp_path / "half", tmp_path / "hf")[0] == 0
    assert hf.read_config(tmp_path / "hf").mtp_num_layers == 0
    # Files that are not what config.json says keep their bits all the same.
    lying = tmp_path / "lying"
    shutil.copytree(thin_policy, lying)
    config = json.loads((lying / "config.json").read_text())
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    (lying / "config.json").write_text(json.dumps(config))
    assert convert(lying, tmp_path / "full", "--to", "hf")[0] == 0
    assert tensors(tmp_path / "full") == tensors(thin_policy)


@contextlib.contextmanager
def no_file_beyond(size: int):
    """A limit on the size of a file stands in for a full disk: both fail inside write(2)."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_a_disk_that_fills_up_leaves_nothing_and_what_was_there(to, thin_policy, convert, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    target = here / "target"
    assert convert(thin_policy, target, "--to", to)[0] == 0
    before = sorted(str(path) for path in here.rglob("*"))
    with no_file_beyond(4096):
        status, _, errors = convert(thin_policy, here / "new", "--to", to)
        assert status == 1 and "too large" in errors and "Traceback" not in errors
    assert sorted(str(path) for path in here.rglob("*")) == before
