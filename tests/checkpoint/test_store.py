"""Checkpoints survive kills, damage, full disks and other meshes, and say so when they do not."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.checked_json import CheckpointError
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import fitted_to


def _params(seed: int = 0, width: int = 16) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "embed": jnp.asarray(rng.normal(size=(32, width)), jnp.float32),
        "layers": {"q": jnp.asarray(rng.normal(size=(2, width, width)), jnp.bfloat16)},
    }


def _state(seed: int = 0) -> dict:
    params = _params(seed)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {"policy": params, "policy_opt": optimizer.init(params)}


def _abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _values(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _assert_same(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for left, right in zip(_values(got), _values(want), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def _data_file(directory: Path) -> Path:
    """The largest file of a checkpoint: it holds the arrays."""
    return max((f for f in directory.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def test_a_restored_state_has_the_same_bits_structure_and_metadata(tmp_path):
    state = _state(3) | {"draft_opt": optax.EmptyState()}
    meta = {"step": 7, "data": {"epoch": 1, "order": [3, 1]}, "arms": None, "rate": 0.1}
    with Checkpointer(tmp_path / "run") as saver:
        saver.save(7, state, meta)
    with Checkpointer(tmp_path / "run") as reader:
        restored, restored_meta = reader.restore(None, _abstract(state))
        only_policy, _ = reader.restore(7, {"policy": _abstract(state["policy"])})
    _assert_same(restored, state)
    assert type(restored["policy_opt"]) is type(state["policy_opt"])
    assert restored_meta == meta
    _assert_same(only_policy["policy"], state["policy"])


def test_only_the_last_k_steps_are_kept(tmp_path):
    with Checkpointer(tmp_path, keep_last=2) as saver:
        assert saver.all_steps() == []
        for step in (1, 2, 5, 9):
            saver.save(step, _state(step), {"step": step})
        saver.wait()
        assert saver.all_steps() == [5, 9]
        restored, meta = saver.restore(5, _abstract(_state()))
    _assert_same(restored, _state(5))
    assert meta == {"step": 5}


def test_arrays_donated_right_after_save_are_stored_as_they_were(tmp_path):
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.zeros((1500, 1500))
    with Checkpointer(tmp_path) as saver:
        saver.save(0, {"w": {"x": array}}, {})
        for _ in range(5):
            array = bump(array)
        restored, _ = saver.restore(0, {"w": {"x": array}})
    assert np.all(np.asarray(restored["w"]["x"]) == 0)


def test_a_state_restores_into_another_sharding(tmp_path):
    state = {"policy": {"w": jnp.arange(64.0).reshape(8, 8)}}
    mesh = jax.make_mesh((4, 2), ("data", "tp"))
    wanted = jax.sharding.NamedSharding(mesh, jax.P("data", "tp"))
    other = jax.sharding.NamedSharding(mesh, jax.P(None, "data"))
    struct = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=wanted)
    with Checkpointer(tmp_path) as saver:
        saver.save(0, state, {})
        sharded, _ = saver.restore(0, {"policy": {"w": struct}})
        saver.save(1, sharded, {})
        struct = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=other)
        resharded, _ = saver.restore(1, {"policy": {"w": struct}})
    assert sharded["policy"]["w"].sharding == wanted
    assert resharded["policy"]["w"].sharding == other
    np.testing.assert_array_equal(np.asarray(sharded["policy"]["w"]), state["policy"]["w"])
    np.testing.assert_array_equal(np.asarray(resharded["policy"]["w"]), state["policy"]["w"])


def _damage_truncate(directory: Path) -> None:
    file = _data_file(directory)
    file.write_bytes(file.read_bytes()[:100])


def _damage_flip_one_bit(directory: Path) -> None:
    file = _data_file(directory)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def _damage_remove_metadata(directory: Path) -> None:
    (directory / "_CHECKPOINT_METADATA").unlink()


def _damage_remove_a_tree(directory: Path) -> None:
    shutil.rmtree(directory / "policy_opt")


@pytest.mark.parametrize(
    "damage",
    [
        _damage_truncate,
        _damage_flip_one_bit,
        _damage_remove_metadata,
        _damage_remove_a_tree,
    ],
)
def test_a_damaged_checkpoint_names_the_newest_intact_older_one(tmp_path, damage):
    with Checkpointer(tmp_path) as saver:
        for step in (1, 2, 3):
            saver.save(step, _state(step), {"step": step})
    damage(tmp_path / "3")
    _damage_truncate(tmp_path / "2")
    with Checkpointer(tmp_path) as reader:
        with pytest.raises(CheckpointError, match=r"3 is damaged: .* use --resume_step 1"):
            reader.restore(None, _abstract(_state()))
        restored, meta = reader.restore(1, _abstract(_state()))
        _assert_same(restored, _state(1))
        # Going on from step 1 abandons the damaged future.
        reader.save(2, _state(22), {"step": 2}, block=True)
        assert reader.all_steps() == [1, 2]
        _assert_same(reader.restore(None, _abstract(_state()))[0], _state(22))


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_the_array(tmp_path):
    with Checkpointer(tmp_path) as saver:
        saver.save(0, {"policy": _params()}, {}, block=True)
        wider = _abstract({"policy": _params(width=24)})
        with pytest.raises(CheckpointError, match=r"embed is .*\[32, 16\] .*\[32, 24\]"):
            saver.restore(0, wider)
        more = _abstract({"policy": _params() | {"lm_head": jnp.zeros(3)}})
        with pytest.raises(CheckpointError, match="lm_head is absent in the checkpoint"):
            saver.restore(0, more)
        with pytest.raises(CheckpointError, match=r"holds \['policy'\], not 'draft'"):
            saver.restore(0, {"draft": {}})


def test_weights_take_the_containers_of_others_or_are_refused_by_the_name_of_the_array():
    read = {"blocks": {"0": np.ones(3), "1": np.full(3, 2.0)}}
    fitted = fitted_to({"blocks": (np.zeros(3), np.zeros(3))}, read, "the head")
    assert isinstance(fitted["blocks"], tuple) and [x[0] for x in fitted["blocks"]] == [1, 2]
    for like, said in (
        (
            (np.zeros(3), np.zeros(2)),
            r"the head does .* wrong shape: blocks/1, expected \[2\], got \[3\]",
        ),
        ((np.zeros(3),), r"unexpected: blocks/1, \[3\]"),
        ((np.zeros(3),) * 3, r"missing: blocks/2, expected \[3\]"),
    ):
        with pytest.raises(CheckpointError, match=said):
            fitted_to({"blocks": like}, read, "the head")


def test_a_second_run_cannot_overwrite_newer_checkpoints_by_mistake(tmp_path):
    with Checkpointer(tmp_path) as saver:
        saver.save(5, _state(), {}, block=True)
    with Checkpointer(tmp_path) as saver:
        with pytest.raises(CheckpointError, match="already holds step 5"):
            saver.save(1, _state(), {})


_CHILD = """
    import os, resource, signal, sys, time
    import jax, jax.numpy as jnp, numpy as np
    from specjax.checked_json import CheckpointError
    from specjax.checkpoint.store import Checkpointer

    def state(step):
        noise = np.random.default_rng(step).normal(size=(1200, 1200)).astype(np.float32)
        return {"policy": {"w": jnp.asarray(noise)}}
"""


def _child(body: str, *arguments: object) -> subprocess.Popen:
    code = textwrap.dedent(_CHILD) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).resolve().parent.parent.parent,
    )


def test_kill_9_in_the_middle_of_a_save_leaves_the_earlier_checkpoint_loadable(tmp_path):
    child = _child(
        """
        saver = Checkpointer(sys.argv[1])
        saver.save(1, state(1), {"step": 1}, block=True)
        print("saved", flush=True)
        os.rename = lambda *names: time.sleep(600)  # that a save has ended is a new name
        saver.save(2, {f"tree{i}": state(i) for i in range(40)}, {"step": 2})
        """,
        tmp_path,
    )
    assert child.stdout.readline() == "saved\n", child.communicate()
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("2.*")):  # Orbax's temporary directory for step 2
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("2.*")) and not (tmp_path / "2").exists(), "killed too late"

    struct = {"policy": {"w": jax.ShapeDtypeStruct((1200, 1200), jnp.float32)}}
    with Checkpointer(tmp_path) as reader:
        assert reader.all_steps() == [1]
        restored, meta = reader.restore(None, struct)
        noise = np.random.default_rng(1).normal(size=(1200, 1200)).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(restored["policy"]["w"]), noise)
        assert meta == {"step": 1}
        reader.save(2, restored, {"step": 2}, block=True)
        assert reader.all_steps() == [1, 2]
    assert not list(tmp_path.glob("*tmp*")), "the partial save still takes disk space"


def test_a_disk_that_cannot_take_the_save_is_reported_and_loses_nothing(tmp_path):
    # A limit on the size of a file stands in for a full disk: both fail inside write(2).
    child = _child(
        """
        saver = Checkpointer(sys.argv[1], keep_last=2)
        for step in (1, 2):
            saver.save(step, state(step), {"step": step}, block=True)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
        saver.save(3, state(3), {"step": 3})
        try:
            saver.wait()
        except CheckpointError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        print(saver.all_steps(), sorted(os.listdir(sys.argv[1])))
        saver.save(3, state(3), {"step": 3}, block=True)
        print(saver.all_steps())
        saver.close()
        """,
        tmp_path,
    )
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    lines = out.splitlines()
    assert "saving step 3" in lines[0] and "File too large" in lines[0]
    assert "MiB free on that disk" in lines[0] and lines[0].endswith("untouched: [1, 2]")
    assert lines[1:] == ["[1, 2] ['1', '2']", "[2, 3]"]
    assert "Traceback" not in err
