"""Unpack an official archive: only the files expected of it, checked, and all of them or none."""

import os
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

from sfiformer.data.official.registry import Dataset

_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


def extract(archive: Path, dataset: Dataset, target: Path) -> None:
    """Unpack the raw files of `dataset` from a zip `archive` into the new folder `target`.

    Reading a member to its end checks its CRC, so one pass verifies and unpacks. An archive with a member
    that points outside (absolute, "..", or a link) is refused altogether.
    """
    try:
        with zipfile.ZipFile(archive) as source, new_folder(target) as part:
            members = _members(source, dataset, archive)
            _check_space(sum(member.file_size for member in members), part)
            for member, file in zip(members, dataset.files, strict=True):
                with source.open(member) as packed, open(part / file, "wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
                    unpacked.flush()
                    os.fsync(unpacked.fileno())
    except _DAMAGE as error:
        raise ValueError(
            f"{archive} is not a whole zip archive: {error}; get {dataset.archive} anew, or elsewhere"
        ) from error


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that is named `target` when the block ends well: a `target` that exists is whole.

    Until then it is called `target`.part. What a killed process left under that name is removed, so the
    caller holds a lock against others that fill the same folder.
    """
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        _sync_folder(part)
        os.rename(part, target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _members(source: zipfile.ZipFile, dataset: Dataset, archive: Path) -> list[zipfile.ZipInfo]:
    """The member of each raw file, in the order of `dataset.files`."""
    for member in source.infolist():
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ValueError(
                f"{archive}: member {member.filename!r} is a link or a device; the archive is refused"
            )
        if _escapes(member.filename):
            raise ValueError(f"{archive}: member {member.filename!r} points outside; the archive is refused")
    names = source.namelist()
    wanted = [f"{dataset.inner}/{file}" if dataset.inner else file for file in dataset.files]
    wrong = [name for name in wanted if names.count(name) != 1]
    if wrong:
        raise ValueError(
            f"{archive} is not the official {dataset.archive}: it must hold {', '.join(wrong)} exactly once "
            f"each, and holds {', '.join(names[:8]) or 'nothing'}{' …' if len(names) > 8 else ''}"
        )
    return [source.getinfo(name) for name in wanted]


def _escapes(name: str) -> bool:
    # Windows rules as well: there "a\\..\\b" has parts and "C:b" a drive.
    return any(
        path.is_absolute() or path.drive or path.root or ".." in path.parts
        for path in (PurePosixPath(name), PureWindowsPath(name))
    )


def _check_space(needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"unpacking into {folder.parent} takes {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free"
        )


def _sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut, where a folder can be opened for that."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
