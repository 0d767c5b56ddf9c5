"""Writing files and folders so that no half of one is ever taken for a whole."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a write, whose errors name no file


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that takes its place at `path` when all is on the disk, or leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _sibling(path)
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):  # of a read-only disk, say: the first error is the one to tell
            partial.unlink()
        if isinstance(error, OSError) and (str(error.filename) == str(partial) or error.errno in NO_ROOM):
            error.filename = str(path)  # the name that the user knows
        raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill that takes its place at `folder` when the block ends well, or leaves nothing behind.

    What was at `folder` before is replaced, in two renames: a reader finds the old one, the new one, or for
    an instant none. The files in it must be synced by their writer.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, old = _sibling(folder), _sibling(folder)
    partial.mkdir()
    try:
        yield partial
        if folder.exists():
            os.replace(folder, old)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists():
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sibling(path: Path) -> Path:
    """A hidden, unused name beside `path`; unlike tempfile's, what is made there has ordinary permissions."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: what was created or renamed there outlasts a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cell(text: str) -> str:
    """Text as a table can hold it: carriage returns, which csv may leave unquoted, and halves of characters as escapes."""
    return text.replace("\r", r"\r").encode(errors="backslashreplace").decode()
