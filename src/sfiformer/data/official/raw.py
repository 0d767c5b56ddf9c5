"""Read raw files without running what is in them.

A pickle can call any function that it names. The official raw files need very few: those that rebuild tensors
and NumPy arrays. These two readers know no others.
"""

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def read_raw(path: Path) -> Any:
    """The contents of a raw file: `.pickle` (plain pickle) or `.pt` (written by `torch.save`)."""
    try:
        if path.suffix == ".pickle":
            with open(path, "rb") as file:
                return _Unpickler(file).load()
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        forbidden = re.search(r"\bGLOBAL (\S+)", str(error))
        if forbidden:
            raise ValueError(
                f"{path} names {forbidden[1].rstrip('.')}, which no official raw file needs; it is not "
                "loaded, since it could run code. Get the file from a source you trust"
            ) from error
        # PyTorch's own message advises to load the file in the unsafe way.
        reason = type(error).__name__ if "weights_only" in str(error) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} cannot be read, it may be cut short or damaged ({reason}); delete {path.parent} and "
            "fetch the dataset anew"
        ) from error


def as_tensor(value: Any) -> Tensor:
    """A tensor from what raw files hold: a tensor, an array, or a list of numbers."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, _Array):
        return torch.from_numpy(value.array)
    if isinstance(value, list | tuple | int | float):
        return torch.tensor(value)
    raise ValueError(f"expected a tensor, an array or a list of numbers and found {type(value).__name__}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not allowed")
        return _ALLOWED[module, name]


# Stand-ins for what a pickle of tensors and arrays calls. They take no default arguments and keep no state of
# their own, so that a pickle that sets attributes on them (opcode BUILD) gains nothing.


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _tensor(storage: Any, offset: int, size: tuple, stride: tuple, requires_grad: bool, hooks: Any) -> Tensor:
    if not isinstance(storage, torch.storage.TypedStorage):
        raise pickle.UnpicklingError("a tensor without a storage")
    held = storage._untyped_storage.nbytes()
    tensor = torch._utils._rebuild_tensor(storage, offset, size, stride)
    if (
        tensor.untyped_storage().nbytes() != held
    ):  # PyTorch grows a storage that is too short, by whatever is in memory
        raise pickle.UnpicklingError(f"a tensor of size {tuple(size)} in a storage of {held} bytes")
    return tensor


class _Dtype:
    """In place of numpy.dtype: booleans and numbers only."""

    __slots__ = ("dtype",)

    def __init__(self, code: str, align: bool, copy: bool) -> None:
        if not re.fullmatch(r"b1|[iu][1248]|f[248]", code):
            raise pickle.UnpicklingError(f"an array of dtype {code!r}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        if state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """In place of numpy.ndarray."""

    __slots__ = ("array",)

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, data = state
        values = np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if fortran else "C")
        self.array = values.astype(values.dtype.newbyteorder("="))  # a copy that may be written to


def _array(kind: Any, shape: tuple, code: bytes) -> _Array:
    return _Array()


def _scalar(dtype: _Dtype, data: bytes) -> int | float:
    return np.frombuffer(data, dtype.dtype)[0].item()


def _encode(text: str, encoding: str) -> bytes:
    return text.encode("latin1")  # the only encoding in which pickle writes bytes as text


_ALLOWED: dict[tuple[str, str], Callable] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
}
