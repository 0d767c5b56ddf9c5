import io
import os
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch

from sfiformer.data.official.raw import as_tensor, read_raw


class Call:
    """Pickles to a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def pickled(path, value, protocol=4):
    path.write_bytes(pickle.dumps(value, protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_and_lists_come_back(tmp_path, protocol):
    base = torch.arange(24.0).view(4, 6)
    value = [(base, base[1:, ::2], torch.arange(5), [1, 2, 3]), {"empty": torch.empty(0, 3)}]
    (first, view, count, labels), rest = read_raw(pickled(tmp_path / "a.pickle", value, protocol))
    assert torch.equal(first, base)
    assert torch.equal(view, base[1:, ::2])
    assert torch.equal(count, torch.arange(5))
    assert labels == [1, 2, 3]
    assert rest["empty"].shape == (0, 3)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64", ">f4", ">i8"]
)
def test_arrays_come_back(tmp_path, protocol, dtype):
    array = (np.arange(12).reshape(3, 4) % 5).astype(dtype)
    value = [array, np.asfortranarray(array), array[0, 2]]
    first, fortran, scalar = read_raw(pickled(tmp_path / "a.pickle", value, protocol))
    for tensor in (as_tensor(first), as_tensor(fortran)):
        assert tensor.tolist() == array.tolist()
        assert tensor.numpy().dtype == array.dtype.newbyteorder("=")
    assert as_tensor([scalar, scalar]).tolist() == [array[0, 2].item()] * 2


def test_what_is_no_data_is_no_tensor():
    with pytest.raises(ValueError, match="found str"):
        as_tensor("text")


def evil_storage(command):
    file = io.BytesIO()
    torch.save(Call(os.system, command), file)
    return Call(torch.storage._load_from_bytes, file.getvalue())


ATTACKS = {
    "system": lambda command: [(Call(os.system, command),)],
    "eval": lambda command: Call(eval, f"__import__('os').system({command!r})"),
    "storage": evil_storage,
    "array": lambda command: np.array([Call(os.system, command)], dtype=object),
    "attribute": lambda command: [Call(getattr, "text", "upper"), Call(os.system, command)],
}


@pytest.mark.parametrize("suffix", [".pickle", ".pt"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_that_calls_something_is_refused_by_name_and_does_not_run(tmp_path, suffix, attack):
    made = tmp_path / "made"
    path = tmp_path / f"train{suffix}"
    value = ATTACKS[attack](f"touch {made}")
    if suffix == ".pt":
        torch.save(value, path)
    else:
        pickled(path, value)
    with pytest.raises(
        ValueError, match=rf"train\{suffix}.*(system|eval|getattr|_load_from_bytes|numpy|'O8')"
    ):
        read_raw(path)
    assert not made.exists()
    if suffix == ".pickle" and attack != "storage":  # the attack is a real one: plain pickle runs it
        pickle.loads(path.read_bytes())
        assert made.exists()


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    storage = Call(torch.storage._load_from_bytes, pickle.loads(_storage_bytes(torch.arange(4))))
    value = Call(torch._utils._rebuild_tensor_v2, storage, 0, (1000,), (1,), False, OrderedDict())
    with pytest.raises(ValueError, match="in a storage of 32 bytes"):
        read_raw(pickled(tmp_path / "a.pickle", value))


def _storage_bytes(tensor):
    """The bytes that a plain pickle of a tensor keeps its storage in."""
    found = []

    class Spy(pickle.Unpickler):
        def find_class(self, module, name):
            if name == "_load_from_bytes":
                return lambda data: found.append(data) or torch.storage._load_from_bytes(data)
            return super().find_class(module, name)

    Spy(io.BytesIO(pickle.dumps(tensor))).load()
    return pickle.dumps(found[0])


@pytest.mark.parametrize("suffix", [".pickle", ".pt"])
@pytest.mark.parametrize("keep", [0, 1, 40, 200, 400])
def test_a_damaged_file_is_named(tmp_path, suffix, keep):
    path = tmp_path / f"val{suffix}"
    if suffix == ".pt":
        torch.save([torch.arange(100)], path)
    else:
        pickled(path, [torch.arange(100)])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ValueError, match=rf"val\{suffix} cannot be read(?!.*weights_only).*delete .* and fetch"
    ):
        read_raw(path)


def test_a_missing_file_is_an_os_error(tmp_path):
    for suffix in (".pickle", ".pt"):
        with pytest.raises(FileNotFoundError):
            read_raw(tmp_path / f"none{suffix}")
