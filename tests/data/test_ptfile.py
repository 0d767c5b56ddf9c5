import os
import pickle
import zipfile

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from sfiformer.data.custom import load_custom
from sfiformer.data.ptfile import load_pt


def graph(**fields):
    return Data(x=torch.ones(2, 3), edge_index=torch.tensor([[0, 1], [1, 0]]), **fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16, torch.bool, torch.uint16])
def test_reads_lists_of_data(tmp_path, dtype):
    torch.save([graph(y=torch.zeros(1, dtype=dtype), name="a"), graph()], tmp_path / "g.pt")
    first, second = load_pt(tmp_path / "g.pt")
    assert first.y.dtype == dtype
    assert first.name == "a"
    assert second.num_nodes == 2


def test_reads_a_single_graph(tmp_path):
    torch.save(graph(), tmp_path / "g.pt")
    assert len(load_pt(tmp_path / "g.pt")) == 1


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_runs_nothing_from_the_file(tmp_path):
    marker = tmp_path / "ran"
    torch.save([graph(y=Hostile(marker))], tmp_path / "g.pt")
    with pytest.raises(ValueError, match=r"refused: it holds \w+\.mkdir"):
        load_pt(tmp_path / "g.pt")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([HeteroData()], r"refused: it holds .*torch_geometric.data.hetero_data.HeteroData"),
        ({"x": torch.ones(2)}, "holds a dict, not a list of PyG Data"),
        ([torch.ones(2)], "holds a list, not a list of PyG Data"),
    ],
)
def test_refuses_everything_else(tmp_path, content, message):
    torch.save(content, tmp_path / "g.pt")
    with pytest.raises(ValueError, match=message):
        load_pt(tmp_path / "g.pt")


def test_refuses_other_files(tmp_path):
    (tmp_path / "plain.pt").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match=r"plain.pt is not a file of torch.save"):
        load_pt(tmp_path / "plain.pt")
    torch.save([graph()], tmp_path / "whole.pt")
    content = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cut.pt is not a file of torch.save"):
        load_pt(tmp_path / "cut.pt")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (b"\x80\x02R.", "g.pt cannot be read: "),
        (b"((.", "g.pt cannot be read: "),
        (b"\x80\x02]ctorch_geometric.data.data\nData\n)\x81a.", "g.pt, graph 0: not a whole PyG Data"),
    ],
)
def test_refuses_pickles_of_any_bytes(tmp_path, code, message):
    torch.save([graph()], tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "g.pt", "w") as other:
        for name in whole.namelist():
            other.writestr(name, code if name.endswith("data.pkl") else whole.read(name))
    with pytest.raises(ValueError, match=message):
        load_custom(tmp_path / "g.pt")


def test_refuses_archives_of_another_kind(tmp_path):
    torch.save([graph()], tmp_path / "g.pt")
    content = bytearray((tmp_path / "g.pt").read_bytes())
    content[content.index(b"PK\x01\x02") + 6] = 99  # release of zip that the first member takes to be read
    (tmp_path / "g.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"g.pt is not a file of torch.save: zip file version"):
        load_pt(tmp_path / "g.pt")


def test_a_list_of_smiles_is_told_where_they_are_read():
    with pytest.raises(
        ValueError, match=r"^the list, graph 0: text \('CCO'\), .*; SMILES alone are read from a CSV"
    ):
        load_custom(["CCO", "CCN"])
