"""What the pickle inside a file of torch.save names, looked at before anything of it is loaded.

`torch.load(weights_only=True)` calls every class that some package has registered with it, and PyG registers such
whose constructors touch files: so names are checked against a list of our own first.
"""

import pickletools
import re
import zipfile
from collections.abc import Set
from pathlib import Path

_TENSORS = {
    "collections OrderedDict",
    "torch Size",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch.storage UntypedStorage",
}
_DTYPE = re.compile(r"torch (\w+Storage|u?int\d+|b?float\d+|bool)")


def foreign_names(path: Path, allowed: Set[str] = frozenset()) -> list[str]:
    """The classes and functions that a file names beside those of tensors and the `allowed` ("module name"); nothing is run.

    Raises:
        ValueError: why it is not a file of torch.save.
    """
    names = {name for name in _names(path) - _TENSORS - allowed if not _DTYPE.fullmatch(name)}
    return sorted(name.replace(" ", ".") for name in names)


def _names(path: Path) -> set[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            # PyTorch's zip reader does not mind the case of names: any second one is refused.
            members = [name for name in archive.namelist() if name.lower().endswith("data.pkl")]
            if len(members) != 1:
                raise ValueError(f"{len(members)} members called data.pkl")
            code = archive.read(members[0])
        operations = list(pickletools.genops(code))
    except OSError:
        raise
    except Exception as error:  # encrypted, of another compression, damaged: each has its own class
        raise ValueError(str(error)) from None
    names = {str(argument) for opcode, argument, _ in operations if opcode.name in ("GLOBAL", "INST")}
    # torch.save writes protocol 2, which names everything in place; later protocols name by the stack.
    if any(opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4") for opcode, _, _ in operations):
        names.add("something named by a pickle protocol that torch.save does not write")
    return names
