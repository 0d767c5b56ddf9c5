"""The names of files."""

import pytest

from sfiformer.explain.pictures import file_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [("test[3]", "test-3"), ("new.csv[CHEMBL25]", "new.csv-CHEMBL25"), ("new.csv[a-b]", "new.csv-a-b")],
)
def test_plain_names_are_kept(name, expected):
    assert file_name(name) == expected


def test_no_two_graphs_share_their_pictures():
    ids = ["a-b", "a/b", "a b", "a--b", "a-b-", "[a-b", "a[b", "a]b", "x" * 300, "x" * 301]
    names = [file_name(f"new.csv[{one}]") for one in ids]
    assert len(set(names)) == len(ids)
    assert all(len(name) < 120 and "/" not in name for name in names)
