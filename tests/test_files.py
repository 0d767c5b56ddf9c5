"""Files that are whole or not there."""

import errno
from pathlib import Path

import pytest

from sfiformer.files import whole_file


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder where even root cannot write")
def test_an_error_names_the_file_that_was_asked_for():
    with pytest.raises(FileNotFoundError) as caught, whole_file(Path("/proc/table.csv")):
        pass
    assert caught.value.filename == "/proc/table.csv"


def test_a_disk_without_room_is_told_with_the_file(tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught, whole_file(tmp_path / "table.csv") as file:
            file.write(bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path / "table.csv")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_cleared_away_hides_no_error(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="Read-only") as caught, whole_file(tmp_path / "table.csv"):
        pass
    assert caught.value.filename == str(tmp_path / "table.csv")
