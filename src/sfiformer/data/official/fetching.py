"""Bring the raw files of an official dataset to disk, from where it was published or from a mirror."""

import hashlib
import logging
import os
import shutil
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from filelock import FileLock

from sfiformer.data.official.archive import extract
from sfiformer.data.official.registry import Dataset, find

logger = logging.getLogger(__name__)

_TIMEOUT = 60  # seconds without a byte


def fetch(name: str, root: str | Path, mirror: str | Path | None = None) -> Path:
    """Make sure that the raw files of dataset `name` lie under `root`, and return their folder.

    Files that are there already (unpacked by hand, or by PyTorch Geometric) are taken as they are. Otherwise
    the archive comes from `mirror`, a folder or an http(s) address that holds the official archives under
    their own names, or else from the official address. A mirror may hold a checksum beside an archive,
    `NAME.zip.sha256`, as `sha256sum` writes it. An interrupted download is resumed where the server can.
    Nothing but a verified, completely unpacked archive makes a raw folder.
    """
    dataset = find(name)
    raw = Path(root) / dataset.folder / "raw"
    if _is_whole(raw, dataset):
        return raw
    raw.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(raw.parent / ".lock"):
        if not _is_whole(raw, dataset):  # another process may have brought it meanwhile
            if raw.exists():
                raw.rmdir()  # it is empty, see _is_whole
            _bring(dataset, raw, mirror)
    return raw


def _is_whole(raw: Path, dataset: Dataset) -> bool:
    try:
        there = os.listdir(raw)  # one look: another process may put the whole folder there at any moment
    except FileNotFoundError:
        return False
    missing = [file for file in dataset.files if file not in there]
    if missing and there:
        raise ValueError(
            f"{raw} is incomplete: {', '.join(missing)} not found. Put the missing files there, or delete "
            "the folder to fetch the dataset anew"
        )
    return not missing


def _bring(dataset: Dataset, raw: Path, mirror: str | Path | None) -> None:
    if mirror is not None and not _is_address(mirror):
        archive = Path(mirror) / dataset.archive
        if not archive.is_file():
            raise FileNotFoundError(f"the mirror folder {mirror} holds no {dataset.archive}")
        beside = archive.with_name(archive.name + ".sha256")
        _verify(archive, beside.read_text() if beside.is_file() else None)
        extract(archive, dataset, raw)
        return

    url = dataset.url if mirror is None else f"{str(mirror).rstrip('/')}/{dataset.archive}"
    part = raw.parent / f"{dataset.archive}.part"
    resumed = part.exists()
    while True:
        try:
            checksum = None if mirror is None else _read_checksum(f"{url}.sha256")
            _download(url, part)
        except (URLError, HTTPException, ConnectionError, TimeoutError) as error:
            raise OSError(
                f"{dataset.name} could not be downloaded from {url}: {error}. Run again to resume, or give "
                f"a mirror (--data.mirror of sfi train, --mirror of sfi data fetch): a folder or an address that "
                f"holds {dataset.archive}"
            ) from error
        try:
            _verify(part, checksum)
            extract(part, dataset, raw)
            break
        except ValueError as error:
            part.unlink()
            if not resumed:
                raise ValueError(f"what {url} sent is not usable: {error}") from error
            resumed = False  # the old bytes may be of another version of the file: once more, from the start
    part.unlink()


def _is_address(mirror: str | Path) -> bool:
    scheme, separator, _ = str(mirror).partition("://")
    if separator and scheme not in ("http", "https"):
        raise ValueError(f"the mirror {mirror} is neither a folder nor an http(s) address")
    return bool(separator)


def _download(url: str, part: Path) -> None:
    """Download `url` to `part`, going on after the bytes that are there if the server can."""
    have = part.stat().st_size if part.exists() else 0
    try:
        response = _open(url, {"Range": f"bytes={have}-"} if have else {})
    except HTTPError as error:
        if error.code != 416:  # Range Not Satisfiable
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return  # it was complete
        have, response = 0, _open(url, {})
    with closing(response):
        if response.status != 206 or not response.headers.get("Content-Range", "").startswith(
            f"bytes {have}-"
        ):
            have = 0
        length = response.headers.get("Content-Length")
        logger.info("downloading %s: %s bytes, %d at hand", url, length or "unknown", have)
        with open(part, "ab" if have else "wb") as file:
            shutil.copyfileobj(response, file, 1 << 20)
            received = file.tell() - have
    if length is not None and received != int(length):  # urllib says nothing when a connection ends early
        raise ConnectionError(f"the connection ended after {received} of {length} bytes")


def _open(url: str, headers: dict[str, str]) -> HTTPResponse:
    return urlopen(Request(url, headers={"User-Agent": "sfiformer", **headers}), timeout=_TIMEOUT)


def _read_checksum(url: str) -> str | None:
    try:
        with closing(_open(url, {})) as response:
            return response.read(4096).decode("ascii", "replace")
    except HTTPError as error:
        if error.code not in (403, 404, 410):
            raise
        return None  # the mirror has none


def _verify(archive: Path, checksum: str | None) -> None:
    """Compare the SHA-256 of `archive` with the first word of `checksum`, if there is one."""
    if checksum is None:
        return
    expected = (checksum.split() or [""])[0].lower()
    with open(archive, "rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ValueError(
            f"the SHA-256 of {archive} is {actual}, and the mirror's checksum file says {expected!r}"
        )
