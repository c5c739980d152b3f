"""Files of torch.save: tensors as torch reads them, and nothing else of a pickle."""

import json
import pickle
import shutil
import struct
import tracemalloc
import zipfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.checkpoint import huggingface as hf
from specjax.weights import open_checkpoint
from specjax.weights.pickled import Pickled, read_tensors

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
STORAGES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage", "int64": "LongStorage", "bool": "BoolStorage",
}  # fmt: skip


class Writer:
    """Writes the pickle and the archive of torch.save, by hand."""

    def __init__(self):
        self.storages: list[bytes] = []

    @staticmethod
    def text(value):
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data

    @staticmethod
    def integer(value):
        data = value.to_bytes(9, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data

    def sizes(self, values):
        return b"(" + b"".join(self.integer(v) for v in values) + b"t"

    def storage(self, key, kind, count):
        parts = self.text("storage") + b"ctorch\n" + kind.encode() + b"\n" + self.text(key)
        return b"(" + parts + self.text("cpu") + self.integer(count) + b"tQ"

    def add(self, array):
        """Adds the storage of an array; returns its key."""
        self.storages.append(np.ascontiguousarray(array).tobytes())
        return str(len(self.storages) - 1)

    def view(self, key, kind, count, offset, shape, strides):
        """The instructions that make a tensor of a storage."""
        empty = b"ccollections\nOrderedDict\n)R"
        inside = self.storage(key, kind, count) + self.integer(offset) + self.sizes(shape)
        inside += self.sizes(strides) + b"\x89" + empty
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + inside + b"tR"

    def tensor(self, array):
        """The instructions that make a tensor with a storage of its own."""
        strides = [s // array.itemsize for s in np.ascontiguousarray(array).strides]
        key, kind = self.add(array), STORAGES[array.dtype.name]
        return self.view(key, kind, array.size, 0, array.shape, strides)

    def named(self, items):
        """A pickle of a state_dict, with instructions for each value."""
        pairs = b"".join(self.text(name) + value for name, value in items.items())
        return b"\x80\x02ccollections\nOrderedDict\n)R(" + pairs + b"u."

    def save(self, path, content, extra=(), stored=zipfile.ZIP_STORED):
        with zipfile.ZipFile(path, "w", stored) as archive:
            archive.writestr("archive/data.pkl", content)
            for key, data in enumerate(self.storages):
                archive.writestr(f"archive/data/{key}", data)
            for name, data in extra:
                archive.writestr(f"archive/{name}", data)


def saved(tmp_path, arrays):
    writer = Writer()
    content = writer.named({name: writer.tensor(array) for name, array in arrays.items()})
    writer.save(tmp_path / "file.bin", content)
    return tmp_path / "file.bin"


def whole(tensor):
    return tensor[(slice(None),) * len(tensor.shape)]


def assert_equal(tensor, expected):
    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype.name)
    assert whole(tensor).tobytes() == np.ascontiguousarray(expected).tobytes()


# --- tensors ------------------------------------------------------------------------------------


def test_a_file_that_torch_wrote_is_read_as_torch_reads_it():
    """The tensors are those of golden/make_pickled.py."""
    found = read_tensors(GOLDEN / "pickled" / "pytorch_model.bin")
    numbers = np.arange(24) - 8
    base = (numbers / 8).astype(np.float32).reshape(4, 6)
    dtypes = {
        "double": "float64", "float": "float32", "half": "float16", "bfloat": ml_dtypes.bfloat16,
        "long": "int64", "int": "int32", "short": "int16", "char": "int8", "byte": "uint8",
    }  # fmt: skip
    expected = {f"{n}.weight": np.abs(numbers).astype(t) for n, t in dtypes.items()} | {
        "weight": np.full((2, 2), 0.5, np.float32),
        "bool.weight": numbers % 3 == 0,
        "base": base,
        "transposed": base.T,
        "rows": base[1:3],
        "steps": base[::2, 1::2],
        "scalar": base[2, 3],
        "repeated": np.stack([base[0]] * 3),
        "empty": np.zeros((0, 5), np.float32),
        "parameter": base[3],
    }
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert_equal(found[name], array)


def test_every_storage_keeps_its_bits(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(3, 5)) * 9 for name in STORAGES}
    arrays = {name: array.astype(np.dtype(name)) for name, array in arrays.items()}
    arrays["nan"] = np.array([np.nan, -0.0, np.inf, 6e-8], np.float16)
    for name, tensor in read_tensors(saved(tmp_path, arrays)).items():
        assert_equal(tensor, arrays[name])


def test_views_share_a_storage_with_offsets_and_strides(tmp_path):
    base = np.arange(24, dtype=np.float32)
    writer = Writer()
    key = writer.add(base)
    views = {
        "all": (0, (4, 6), (6, 1)),
        "turned": (0, (6, 4), (1, 6)),
        "part": (7, (2, 3), (12, 2)),
    }
    content = writer.named(
        {n: writer.view(key, "FloatStorage", 24, *view) for n, view in views.items()}
    )
    writer.save(tmp_path / "file.bin", content)
    found = read_tensors(tmp_path / "file.bin")
    grid = base.reshape(4, 6)
    assert_equal(found["all"], grid)
    assert_equal(found["turned"], grid.T)
    assert_equal(found["part"], np.array([[7, 9, 11], [19, 21, 23]], np.float32))
    np.testing.assert_array_equal(found["turned"][1:3, 2:], grid.T[1:3, 2:])


def test_reading_a_part_does_not_read_the_file(tmp_path):
    file = saved(tmp_path, {"big": np.ones((1 << 12, 1 << 10), np.float32)})  # 16 MiB
    tracemalloc.start()
    part = read_tensors(file)["big"][5:7]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.shape == (2, 1 << 10) and peak < 1 << 20


# --- what is refused ----------------------------------------------------------------------------


class Runs:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def refused(tmp_path, content, *texts, kind=CheckpointError, extra=()):
    writer = Writer()
    writer.add(np.arange(4, dtype=np.float32))
    writer.save(tmp_path / "file.bin", content, extra)
    with pytest.raises(kind) as caught:
        read_tensors(tmp_path / "file.bin")
    for text in (str(tmp_path / "file.bin"), *texts):
        assert text in str(caught.value)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "name"), [(eval, "eval"), (print, "print"), (shutil.rmtree, "shutil.rmtree")]
)
def test_nothing_that_a_pickle_names_is_run(tmp_path, protocol, function, name):
    place = tmp_path / "victim"
    place.mkdir()
    arguments = [f"__import__('os').rmdir({str(place)!r})"] if function is eval else [str(place)]
    content = pickle.dumps({"fc.weight": Runs(function, *arguments)}, protocol)
    refused(tmp_path, content, name, "nothing", kind=UnsupportedModelError)
    assert place.is_dir()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"cos\nsystem\n.", "os.system"),  # named, and not even called
        (b"ctorch\nload\n.", "torch.load"),
        (b"ctorch.hub\nload\n.", "torch.hub.load"),
        (b"ctorch\nfloat16\n.", "torch.float16"),
        (b"ctorch.storage\nUntypedStorage\n.", "torch.storage.UntypedStorage"),
        (b"(ios\nsystem\n.", "os.system"),
        (b"\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"ccollections\nOrderedDict\n)R.", "something other than a dictionary of tensors"),
    ],
)
def test_what_is_no_tensor_is_refused_by_its_name(tmp_path, content, name):
    refused(tmp_path, content, name, kind=UnsupportedModelError)


def test_files_that_are_no_archives_are_damaged(tmp_path):
    file = saved(tmp_path, {"x": np.ones(400, np.float32)})
    data = file.read_bytes()
    for content in (b"", b"PK", data[:-40], data[:200], b"version 1"):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="file.bin is damaged, or no file of torch.save"):
            read_tensors(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        read_tensors(file)
    with pytest.raises(CheckpointError, match="No such file"):
        read_tensors(tmp_path / "none.bin")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("something", b"else")
    with pytest.raises(CheckpointError, match="no file of torch.save"):
        read_tensors(file)


def test_any_changed_byte_is_read_or_refused(tmp_path):
    """No change of a byte outside of the storages raises an error of another kind."""
    file = saved(tmp_path, {"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.float16)})
    data, rng = file.read_bytes(), np.random.default_rng(0)
    for at in rng.integers(0, len(data), 400):
        changed = bytearray(data)
        changed[at] = rng.integers(256)
        file.write_bytes(bytes(changed))
        try:
            for tensor in read_tensors(file).values():
                whole(tensor)
        except (CheckpointError, UnsupportedModelError) as error:
            assert "file.bin" in str(error)


# --- checkpoints --------------------------------------------------------------------------------


@pytest.fixture
def pickled(tmp_path):
    """A policy whose only weights are pytorch_model.bin, and the same one in safetensors."""
    path = tmp_path / "policy"
    shutil.copytree(GOLDEN / "llama", path)
    arrays = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    shutil.move(saved(tmp_path, arrays), path / "pytorch_model.bin")
    return path


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def test_a_policy_in_a_file_of_torch_loads_as_from_safetensors(pickled):
    assert isinstance(open_checkpoint(pickled), Pickled)
    cfg, params, head = hf.load_checkpoint(pickled)
    wanted, expected, _ = hf.load_checkpoint(GOLDEN / "llama")
    assert cfg == wanted and head is None
    assert_same(params, expected)


def test_a_policy_may_be_in_several_files(pickled, tmp_path):
    arrays = load_file(GOLDEN / "llama" / "model.safetensors")
    names, files = sorted(arrays), ["part-1.bin", "part-2.bin"]
    halves = [names[::2], names[1::2]]
    for file, half in zip(files, halves, strict=True):
        shutil.move(saved(tmp_path, {n: arrays[n] for n in half}), pickled / file)
    where = {n: file for file, half in zip(files, halves, strict=True) for n in half}
    index = pickled / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    (pickled / "pytorch_model.bin").unlink()
    assert_same(hf.load_checkpoint(pickled)[1], hf.load_checkpoint(GOLDEN / "llama")[1])
    shutil.copy(pickled / "part-1.bin", pickled / "part-2.bin")
    with pytest.raises(CheckpointError, match="hold the same tensor"):
        hf.load_checkpoint(pickled)
    (pickled / "part-2.bin").unlink()
    with pytest.raises(CheckpointError, match="lists files that are missing: part-2.bin"):
        hf.load_checkpoint(pickled)
