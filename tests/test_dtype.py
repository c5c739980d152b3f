"""dtype `auto`: the checkpoint's on GPU and TPU, float32 on CPU, by one rule by every program."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file

from serve.cli.main import main
from serve.settings import EngineSection, ServeConfig, SpeculationSection, load_llm
from specjax import LLM, SpecConfig, verify
from specjax.checkpoint import huggingface as hf
from specjax.command_line import parse_config
from specjax.config.dtype import resolve_dtype
from specjax.parallel import sharding
from train import rl, sft
from train.schema import DtypeSection, RLConfig, SFTConfig

OFF = SpecConfig(strategy="off")


@pytest.fixture(scope="module")
def half(thin_policy, tmp_path_factory):
    """The thin policy in bfloat16."""
    path = tmp_path_factory.mktemp("half") / "policy"
    cfg, params, head = hf.load_checkpoint(thin_policy, "bfloat16")
    hf.save_checkpoint(path, cfg, params, head, thin_policy)
    return path


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes loaders take the devices for GPUs; what they load runs here."""
    monkeypatch.setattr(sharding, "platform_of", lambda mesh: "gpu")


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_the_rule(stored):
    assert resolve_dtype("auto", stored, "cpu") == "float32"
    assert resolve_dtype("auto", stored, "gpu") == resolve_dtype("auto", stored, "tpu") == stored
    assert resolve_dtype("bfloat16", stored, "cpu") == "bfloat16"
    for asked in ("int8", "half", "", "Auto"):
        with pytest.raises(ValueError, match="dtype must be one of auto, float32"):
            resolve_dtype(asked, stored, "gpu")


def dtypes(tree) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def test_engines_are_in_float32_on_cpu_unless_told(half, capsys):
    llm = LLM(half, OFF, max_batch=1, max_len=32)
    assert llm.cfg.run.compute_dtype == "float32" and dtypes(llm.params) == {"float32"}
    assert len(llm.notes) == 1 and "float32" in llm.notes[0]
    assert "(the checkpoint is in bfloat16)" in llm.notes[0]
    told = LLM(half, OFF, max_batch=1, max_len=32, dtype="bfloat16")
    assert told.cfg.run.compute_dtype == "bfloat16" and dtypes(told.params) == {"bfloat16"}
    with pytest.raises(ValueError, match="dtype must be one of"):
        LLM(half, OFF, dtype="float8")
    asked = ["generate", "--model", str(half), "1+2=", "--max-tokens", "2", "--strategy", "off"]
    assert main([*asked, "--max-len", "32"]) == 0
    said = capsys.readouterr().err
    assert (
        "specjax generate: arithmetic in float32" in said
        and "(the checkpoint is in bfloat16)" in said
    )
    section = EngineSection(max_batch=1, max_len=32)
    off = SpeculationSection(strategy="off")
    served = load_llm(ServeConfig(model=str(half), engine=section, speculation=off))
    assert "(the checkpoint is in bfloat16)" in served.notes[0]


def test_engines_are_in_the_checkpoint_s_dtype_elsewhere(half, thin_policy, on_gpu):
    llm = LLM(half, OFF, max_batch=1, max_len=32)
    assert llm.cfg.run.compute_dtype == "bfloat16" and dtypes(llm.params) == {"bfloat16"}
    assert llm.notes == ["arithmetic in bfloat16, the checkpoint's (the checkpoint is in bfloat16)"]
    assert LLM(thin_policy, OFF, max_batch=1, max_len=32).cfg.run.compute_dtype == "float32"
    section = EngineSection(max_batch=1, max_len=32)
    served = ServeConfig(
        model=str(half), engine=section, speculation=SpeculationSection(strategy="off")
    )
    assert load_llm(served).cfg.run.compute_dtype == "bfloat16"
    assert verify.load(half).cfg.run.compute_dtype == "bfloat16"
    assert verify.load(half, dtype="float32").cfg.run.compute_dtype == "float32"


def test_training_keeps_parameters_in_float32_and_computes_as_the_checkpoint(
    half, tmp_path, on_gpu
):
    trainer = rl.Trainer(parse_config(RLConfig, [f"model={half}", f"out={tmp_path}/rl"])[0])
    assert dtypes(trainer.params) == {"float32"} and trainer.model.run.compute_dtype == "bfloat16"
    assert trainer.engines[0].runner.cfg.run.compute_dtype == "bfloat16"
    # What was chosen is what a resumed run must have.
    assert trainer.fingerprint()["dtype"] == {"params": "float32", "compute": "bfloat16"}
    run = sft.SFTTrainer(parse_config(SFTConfig, [f"init={half}", f"out={tmp_path}/sft"])[0])
    assert dtypes(run.params) == {"float32"} and run.model.run.compute_dtype == "bfloat16"


def test_training_is_in_float32_on_cpu_and_says_so(half, tmp_path):
    trainer = rl.Trainer(parse_config(RLConfig, [f"model={half}", f"out={tmp_path}/rl"])[0])
    assert trainer.model.run.compute_dtype == "float32"
    assert "(the checkpoint is in bfloat16)" in trainer.dtype_line
    section = DtypeSection()
    assert "would vanish" in section.settle("float16", "gpu")
    assert section.compute == "bfloat16"  # for gradients


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_a_config_that_names_no_dtype_has_that_of_its_weights(stored, thin_policy, tmp_path):
    path = tmp_path / "policy"
    shutil.copytree(thin_policy, path)
    for file in ("model.safetensors", "mtp.safetensors"):
        tensors = load_file(path / file)
        save_file({name: t.astype(jnp.dtype(stored)) for name, t in tensors.items()}, path / file)
    config = json.loads((path / "config.json").read_text())
    config |= {"dtype": None, "torch_dtype": None}
    (path / "config.json").write_text(json.dumps(config))
    assert hf.load_checkpoint(path)[0].run.param_dtype == stored
