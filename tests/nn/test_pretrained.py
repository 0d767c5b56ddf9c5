"""Saved models: what comes back is what was saved, and anything else is refused with one clear line."""

import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from sfiformer import ModelConfig, SFiFormer

CONFIG = ModelConfig(
    layers=2, dim=12, heads=2, node_encoder="categories", node_categories=(3, 2), edge_encoder="constant",
    head="node", outputs=4, lam_scaling="largest", alpha=math.inf,
)  # fmt: skip


@pytest.fixture
def trained(make_batch):
    """A model whose buffers (batch norms, N*) are no longer as new."""
    torch.manual_seed(0)
    model = SFiFormer(CONFIG)
    model(make_batch(CONFIG))
    return model.eval()


@pytest.fixture
def folder(trained, tmp_path):
    trained.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_model_comes_back(trained, folder, make_batch):
    random_state = torch.get_rng_state()
    loaded = SFiFormer.from_pretrained(folder)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert loaded.config == CONFIG
    assert not loaded.training
    batch = make_batch(CONFIG, sizes=(5, 8))
    assert torch.equal(loaded(batch), trained(batch))
    assert int(loaded.layers[0].attention.largest) == 14


def test_the_files_are_those_of_hugging_face(trained, folder):
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    settings = json.loads((folder / "config.json").read_text())
    assert (settings["model_type"], settings["architectures"]) == ("sfiformer", ["SFiFormer"])
    state = load_file(folder / "model.safetensors")
    assert state.keys() == trained.state_dict().keys()


def test_other_files_in_the_folder_stay(trained, folder):
    (folder / "README.md").write_text("a model card")
    trained.save_pretrained(folder)
    assert (folder / "README.md").read_text() == "a model card"


def test_a_failed_save_keeps_the_old_model(trained, folder, monkeypatch):
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sfiformer.nn.pretrained.save", full_disk)
    with pytest.raises(OSError, match="No space"):
        trained.save_pretrained(folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_damaged_weights_are_refused(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        SFiFormer.from_pretrained(folder)


def test_foreign_weights_are_refused(folder):
    save_file({"w": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"does not hold the model of .*config\.json: .* is missing \(and"):
        SFiFormer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable JSON"),
        ("[1]", "not of an SFiFormer"),
        ('{"model_type": "bert"}', "not of an SFiFormer"),
        ('{"model_type": "sfiformer", "layrs": 2}', "did you mean 'layers'"),
        ('{"model_type": "sfiformer", "head": "node", "outputs": 4, "node_encoder": "constant",'
         '"edge_encoder": "constant", "dim": 1000000}', "does not hold the model"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        SFiFormer.from_pretrained(folder)


def test_a_missing_folder_and_a_run_folder_are_told(folder, tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        SFiFormer.from_pretrained(tmp_path / "nowhere")
    folder.rename(tmp_path / "best")
    with pytest.raises(ValueError, match=r"no config\.json.*did you mean .*best"):
        SFiFormer.from_pretrained(tmp_path)


def test_the_hub_is_asked_for_a_repository(folder, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def download(repository, file, revision=None):
        asked.append((repository, file, revision))
        if repository == "nobody/nothing":
            raise OSError("404 Client Error\nmore lines")
        return str(folder / file)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    assert SFiFormer.from_pretrained("owner/name", revision="v1").config == CONFIG
    assert asked == [("owner/name", "config.json", "v1"), ("owner/name", "model.safetensors", "v1")]
    with pytest.raises(ValueError, match=r"nobody/nothing, and the Hub's .*404 Client Error$"):
        SFiFormer.from_pretrained("nobody/nothing")

    asked.clear()
    (tmp_path / "runs").mkdir()
    with pytest.raises(
        ValueError, match=r"no folder runs/nope; nor was the Hub asked .* a folder runs: revision='main'"
    ):
        SFiFormer.from_pretrained("runs/nope")
    assert asked == []
    assert SFiFormer.from_pretrained("runs/nope", revision="main").config == CONFIG
