import numpy as np
import pytest
import torch

from sfiformer.data import GraphStore, Standardizer, standardize


def make(seed: int, shift: float) -> GraphStore:
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.rand(40, 3, generator=generator) + shift
    x[:, 2] = 5.0
    return GraphStore(
        node_ptr=torch.tensor([0, 15, 40]),
        edge_ptr=torch.tensor([0, 6, 12]),
        edge_index=torch.randint(0, 15, (2, 12), generator=generator),
        node={"x": x, "kind": torch.arange(40)},
        edge={"edge_attr": torch.randn(12, 1, generator=generator)},
    )


def test_training_split_decides(monkeypatch):
    monkeypatch.setattr(standardize, "ROWS", 7)
    train, test = make(0, 100.0), make(1, -4.0)
    scaling = Standardizer.fit(train)
    got = scaling.apply(train).node["x"].numpy()
    np.testing.assert_allclose(got[:, :2].mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(got[:, :2].std(0), 1, atol=1e-4)
    np.testing.assert_array_equal(got[:, 2], 0)  # constant in the training split
    raw = train.node["x"].numpy().astype(np.float64)
    expected = (test.node["x"].numpy() - raw.mean(0)) / np.where(raw.std(0) > 0, raw.std(0), 1)
    np.testing.assert_allclose(scaling.apply(test).node["x"].numpy(), expected, rtol=1e-4)
    edges = scaling.apply(train).edge["edge_attr"].numpy()
    np.testing.assert_allclose([edges.mean(), edges.std()], [0, 1], atol=1e-5)
    assert float(train.node["x"].mean()) > 50  # the input is untouched


@pytest.mark.parametrize("scale", [1e-25, 1e-9, 1.0, 1e12])
def test_the_unit_of_a_feature_does_not_matter(scale):
    train = make(0, 0.0)
    train = train.with_fields(node={"x": train.node["x"] * scale})
    got = Standardizer.fit(train, ["x"]).apply(train).node["x"].numpy()
    np.testing.assert_allclose(got[:, :2].std(0), 1, atol=1e-4)
    np.testing.assert_allclose(got[:, 2], 0, atol=1e-4 * min(scale, 1))  # constant


def test_faults():
    with pytest.raises(ValueError, match=r"no node or edge field 'z'.*x, kind, edge_attr"):
        Standardizer.fit(make(0, 0.0), ["z"])
    with pytest.raises(ValueError, match="'kind' holds"):
        Standardizer.fit(make(0, 0.0), ["kind"])
