import stat
import zipfile

import pytest

from sfiformer.data.official import find
from sfiformer.data.official.archive import extract, new_folder

FILES = ("train.pt", "val.pt", "test.pt")
PEPTIDES = find("peptides-func")


@pytest.fixture
def target(tmp_path):
    return tmp_path / "home" / "raw"


def write(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


def members(**changes):
    return [(f"peptidesfunc/{file}", changes.get(file, file.encode() * 1000)) for file in FILES]


def nothing_is_left(target):
    return not target.parent.exists() or not any(target.parent.iterdir())


def test_the_raw_files_and_nothing_else_are_unpacked(tmp_path, target):
    extra = [("__MACOSX/peptidesfunc/._train.pt", b"junk"), ("peptidesfunc/", b"")]
    extract(write(tmp_path / "a.zip", [*extra, *members()]), PEPTIDES, target)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == {
        file: file.encode() * 1000 for file in FILES
    }
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("keep", [0, 50, 3000, -5])
def test_a_truncated_archive_is_refused(tmp_path, target, keep):
    path = write(tmp_path / "a.zip", members())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"a\.zip is not a whole zip archive.*get peptidesfunc\.zip anew"):
        extract(path, PEPTIDES, target)
    assert nothing_is_left(target)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_flipped_bit_fails_the_crc(tmp_path, target, compression):
    path = write(tmp_path / "a.zip", members(), compression)
    with zipfile.ZipFile(path) as archive:
        last = archive.getinfo("peptidesfunc/test.pt")
    data = bytearray(path.read_bytes())
    data[last.header_offset + 30 + len(last.filename) + last.compress_size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not a whole zip archive"):
        extract(path, PEPTIDES, target)
    assert nothing_is_left(target)


def test_a_missing_or_doubled_member_is_refused(tmp_path, target):
    with pytest.raises(ValueError, match=r"must hold peptidesfunc/test\.pt exactly once each, and holds pep"):
        extract(write(tmp_path / "a.zip", members()[:2]), PEPTIDES, target)
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = write(tmp_path / "b.zip", [*members(), members()[0]])
    with pytest.raises(ValueError, match=r"must hold peptidesfunc/train\.pt exactly once"):
        extract(path, PEPTIDES, target)
    with pytest.raises(ValueError, match="is not the official"):
        extract(write(tmp_path / "c.zip", [(f"other/{file}", b"") for file in FILES]), PEPTIDES, target)
    assert nothing_is_left(target)


@pytest.mark.parametrize(
    "name", ["../evil.pt", "peptidesfunc/../../evil.pt", "/tmp/evil.pt", "C:\\evil.pt", "a\\..\\..\\evil.pt"]
)
def test_a_member_that_points_outside_is_refused(tmp_path, target, name):
    with pytest.raises(ValueError, match="points outside; the archive is refused"):
        extract(write(tmp_path / "a.zip", [*members(), (name, b"evil")]), PEPTIDES, target)
    assert nothing_is_left(target)
    assert not list(tmp_path.rglob("*evil*"))


def test_a_link_is_refused(tmp_path, target):
    link = zipfile.ZipInfo("peptidesfunc/train.pt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(ValueError, match="is a link or a device"):
        extract(write(tmp_path / "a.zip", [(link, b"/etc/passwd"), *members()[1:]]), PEPTIDES, target)
    assert nothing_is_left(target)


def test_an_archive_larger_than_the_disk_is_refused_at_once(tmp_path, target, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("", (), {"free": 10}))
    with pytest.raises(OSError, match="GB are free"):
        extract(write(tmp_path / "a.zip", members()), PEPTIDES, target)
    assert nothing_is_left(target)


def test_a_new_folder_removes_what_a_killed_process_left(tmp_path):
    left = tmp_path / "raw.part" / "train.pt"
    left.parent.mkdir()
    left.write_bytes(b"half")
    with new_folder(tmp_path / "raw") as part:
        assert not any(part.iterdir())
        (part / "val.pt").write_bytes(b"whole")
        assert not (tmp_path / "raw").exists()
    assert [file.name for file in (tmp_path / "raw").iterdir()] == ["val.pt"]
    assert not left.parent.exists()
