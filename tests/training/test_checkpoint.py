import os
import shutil

import pytest
import torch

from sfiformer import ModelConfig, SFiFormer
from sfiformer.errors import UserError
from sfiformer.training.checkpoint import Checkpoints, read_state


@pytest.fixture
def model():
    return SFiFormer(
        ModelConfig(layers=1, dim=4, heads=1, head="graph", outputs=1).fitted(
            level="graph", outputs=1, node_features=2, edge_features=0
        )
    )


def links(run):
    return {name: os.readlink(run / name) for name in ("best", "last") if (run / name).is_symlink()}


def test_best_and_last_are_links_and_nothing_else_is_kept(tmp_path, model):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.open() is None
    checkpoints.save(model, {}, epoch=0)
    assert links(tmp_path) == {"last": "checkpoints/epoch-0000"}
    checkpoints.save(model, {"x": 1}, epoch=1, best=True)
    checkpoints.save(model, {"x": 2}, epoch=1, step=7)
    assert links(tmp_path) == {
        "best": "checkpoints/epoch-0001",
        "last": "checkpoints/epoch-0001-step-000007",
    }
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "epoch-0001",
        "epoch-0001-step-000007",
    ]
    assert not (tmp_path / "best" / "state.pt").exists()  # only `last` is resumed from
    assert SFiFormer.from_pretrained(tmp_path / "best").config == model.config
    state = Checkpoints(tmp_path).open()
    assert (state["x"], state["best"]) == (2, "epoch-0001")


def test_a_run_killed_between_the_two_links_is_put_right(tmp_path, model, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, {}, epoch=1, best=True)
    monkeypatch.setattr(checkpoints, "_prune", lambda: None)
    point = checkpoints._point
    monkeypatch.setattr(
        checkpoints, "_point", lambda link, name: point(link, name) if link == "last" else None
    )
    checkpoints.save(model, {}, epoch=2, best=True)
    (tmp_path / "checkpoints" / ".epoch-0003.0123456789abcdef").mkdir()
    (tmp_path / ".last.0123456789abcdef").symlink_to("nowhere")
    assert links(tmp_path)["best"] == "checkpoints/epoch-0001"

    assert Checkpoints(tmp_path).open()["best"] == "epoch-0002"
    assert links(tmp_path) == {"best": "checkpoints/epoch-0002", "last": "checkpoints/epoch-0002"}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch-0002"]
    assert not [*tmp_path.glob(".*")]


def test_a_copy_that_followed_links_goes_on(tmp_path, model):
    Checkpoints(tmp_path / "run").save(model, {}, epoch=1, best=True)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = Checkpoints(tmp_path / "copy")
    assert copy.open() is not None
    copy.save(model, {}, epoch=2)
    assert links(tmp_path / "copy") == {"best": "checkpoints/epoch-0001", "last": "checkpoints/epoch-0002"}


def test_states_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"it has no state.pt"):
        read_state(tmp_path)
    for content in (b"", b"nonsense", b"\x80junk", {"format": 0}, [1]):
        if isinstance(content, bytes):
            (tmp_path / "state.pt").write_bytes(content)
        else:
            torch.save(content, tmp_path / "state.pt")
        with pytest.raises(UserError, match=r"state.pt is damaged \([^.]*\); start the run anew"):
            read_state(tmp_path)
    torch.save({"format": 1, "call": print}, tmp_path / "state.pt")
    with pytest.raises(UserError, match=r"state.pt is damaged"):
        read_state(tmp_path)


class Registered:
    """As PyG's ClusterData, which torch.load may call: it reads the file that it is given."""

    called = False

    def __init__(self):
        Registered.called = True

    def __reduce__(self):
        return Registered, ()


def test_what_other_packages_have_registered_is_not_called(tmp_path):
    torch.save({"format": 1, "x": Registered()}, tmp_path / "state.pt")
    Registered.called = False
    with (
        torch.serialization.safe_globals([Registered]),
        pytest.raises(UserError, match=r"state.pt is damaged \(it holds .*Registered\)"),
    ):
        read_state(tmp_path)
    assert not Registered.called
