import hashlib
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sfiformer.data.official import fetch
from sfiformer.data.official.fetching import _is_whole
from sfiformer.data.official.registry import find


class Mirror(BaseHTTPRequestHandler):
    """Serves `files` with byte ranges. `cut` ends the next answers early; `ranges` turns ranges off."""

    files: dict[str, bytes]
    cut: int | None
    ranges: bool
    asked: list[tuple[str, str | None]]

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.asked.append((self.path.lstrip("/"), wanted))
        data = self.files.get(self.path.lstrip("/"))
        if data is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if start >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start : self.cut])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(make_archive, monkeypatch):
    """A mirror on the loopback interface that holds a miniature peptides-func."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    archive = make_archive("peptides-func")
    state = {"files": {archive.name: archive.read_bytes()}, "cut": None, "ranges": True, "asked": []}
    handler = type("Handler", (Mirror,), state)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        handler.url = f"http://127.0.0.1:{http.server_port}"
        yield handler
        http.shutdown()
        thread.join()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


ARCHIVE = "peptidesfunc.zip"


def same_files(raw, tmp_path):
    expected = {file.name: file.read_bytes() for file in (tmp_path / "unpacked" / "peptides-func").iterdir()}
    return {file.name: file.read_bytes() for file in raw.iterdir()} == expected


def left(root):
    """What lies in the dataset's folder besides the lock."""
    return sorted(file.name for file in (root / "peptides-func").iterdir() if file.name != ".lock")


def test_from_a_folder(tmp_path, root, make_archive):
    raw = fetch("Peptides-Func", root, make_archive("peptides-func").parent)
    assert raw == root / "peptides-func" / "raw"
    assert same_files(raw, tmp_path)
    assert left(root) == ["raw"]


def test_what_is_there_is_taken_without_a_mirror(make_raw, root):
    raw = make_raw("mnist")
    assert fetch("mnist", root) == raw


def test_an_incomplete_raw_folder_is_said(make_raw, root):
    (make_raw("peptides-func") / "val.pt").unlink()
    with pytest.raises(ValueError, match=r"is incomplete: val\.pt not found"):
        fetch("peptides-func", root)


def test_an_empty_raw_folder_is_filled(tmp_path, root, make_archive):
    (root / "peptides-func" / "raw").mkdir(parents=True)
    assert same_files(fetch("peptides-func", root, make_archive("peptides-func").parent), tmp_path)


def test_a_mirror_without_the_archive_is_said(tmp_path, root, server):
    with pytest.raises(FileNotFoundError, match=r"holds no pcqmcontact\.zip"):
        fetch("pcqm-contact", root, tmp_path)
    with pytest.raises(OSError, match=r"could not be downloaded from .*404.*give a mirror"):
        fetch("pcqm-contact", root, server.url)
    with pytest.raises(OSError, match=r"could not be downloaded from http://127\.0\.0\.1:9/.*give a mirror"):
        fetch("pcqm-contact", root, "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="neither a folder nor an http"):
        fetch("pcqm-contact", root, "ftp://host/folder")


def test_from_an_address(tmp_path, root, server):
    assert same_files(fetch("peptides-func", root, server.url + "/"), tmp_path)
    assert left(root) == ["raw"]


def test_a_cut_download_is_resumed(tmp_path, root, server):
    server.cut = 1000
    with pytest.raises(OSError, match="ended after 1000 of"):
        fetch("peptides-func", root, server.url)
    assert left(root) == [f"{ARCHIVE}.part"]
    server.cut = None
    assert same_files(fetch("peptides-func", root, server.url), tmp_path)
    assert server.asked[-1] == (ARCHIVE, "bytes=1000-")
    assert left(root) == ["raw"]


def test_a_server_without_ranges_sends_all_again(tmp_path, root, server):
    part = root / "peptides-func" / f"{ARCHIVE}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(server.files[ARCHIVE][:1000])
    server.ranges = False
    assert same_files(fetch("peptides-func", root, server.url), tmp_path)


@pytest.mark.parametrize("size", [1000, 10**6])
def test_a_part_of_another_version_is_thrown_away(tmp_path, root, server, size):
    part = root / "peptides-func" / f"{ARCHIVE}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"?" * size)
    assert same_files(fetch("peptides-func", root, server.url), tmp_path)
    assert server.asked[-1] == (ARCHIVE, None)


def test_a_part_that_was_complete_is_used(tmp_path, root, server):
    part = root / "peptides-func" / f"{ARCHIVE}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(server.files[ARCHIVE])
    assert same_files(fetch("peptides-func", root, server.url), tmp_path)
    assert [wanted for name, wanted in server.asked if name == ARCHIVE] == [
        f"bytes={len(server.files[ARCHIVE])}-"
    ]


def test_a_page_instead_of_an_archive_leaves_nothing(root, server):
    server.files[ARCHIVE] = b"<html>This link has expired</html>"
    with pytest.raises(ValueError, match=r"sent is not usable: .*not a whole zip"):
        fetch("peptides-func", root, server.url)
    assert left(root) == []


@pytest.mark.parametrize("where", ["folder", "address"])
def test_a_checksum_beside_the_archive_is_compared(tmp_path, root, server, where):
    mirror = tmp_path / "mirror" if where == "folder" else server.url

    def give(text):
        (tmp_path / "mirror" / f"{ARCHIVE}.sha256").write_text(text)
        server.files[f"{ARCHIVE}.sha256"] = text.encode()

    give("0" * 64 + f"  {ARCHIVE}\n")
    with pytest.raises(ValueError, match="checksum file says '0000"):
        fetch("peptides-func", root, mirror)
    assert left(root) == []
    give(hashlib.sha256(server.files[ARCHIVE]).hexdigest() + f"  {ARCHIVE}\n")
    assert same_files(fetch("peptides-func", root, mirror), tmp_path)


KILLED = """
import shutil, sys, time
from sfiformer.data.official import fetch
from sfiformer.data.official.fetching import _is_whole
from sfiformer.data.official.registry import find

copy = shutil.copyfileobj
def half(source, target, length):
    if target.name.endswith("val.pt"):
        target.write(source.read(100))
        target.flush()
        print("now", flush=True)
        time.sleep(60)
    copy(source, target, length)

shutil.copyfileobj = half
fetch("peptides-func", sys.argv[1], sys.argv[2])
"""


def test_a_process_killed_while_unpacking_leaves_no_raw_folder(tmp_path, root, make_archive):
    mirror = make_archive("peptides-func").parent
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(root), str(mirror)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)
    assert left(root) == ["raw.part"]
    assert same_files(fetch("peptides-func", root, mirror), tmp_path)
    assert left(root) == ["raw"]


def test_a_folder_that_another_process_puts_there_meanwhile_is_whole(root, make_raw):
    """Between two looks at it, of which neither may be taken for the other."""
    raw = make_raw("coco-sp")
    away, stop = raw.rename(raw.with_name("away")), threading.Event()

    def move():
        while not stop.is_set():
            away.rename(raw)
            raw.rename(away)

    other = threading.Thread(target=move)
    other.start()
    try:
        for _ in range(20000):
            _is_whole(raw, find("coco-sp"))  # or not, but never incomplete
    finally:
        stop.set()
        other.join()
