"""SFi-Former: encoders, a stack of GPS layers, a head."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sfiformer.branches import running_ahead
from sfiformer.nn.config import ModelConfig
from sfiformer.nn.encoders import FeatureEncoder
from sfiformer.nn.gps_layer import GPSLayer
from sfiformer.nn.heads import LinkHead, make_head
from sfiformer.nn.partition import Structure
from sfiformer.nn.pretrained import Pretrained, mismatch
from sfiformer.presets import read_preset
from sfiformer.schema import Layer, build


class SFiFormer(Pretrained, nn.Module):
    """Graph transformer with sparse-flow-induced attention and, as settings, its relatives (`ModelConfig`).

    `model(batch)` takes the project's GraphBatch, a PyG Batch or a single PyG Data with the fields `x`,
    `edge_index` (j → i), `edge_attr`, `batch`, `ptr`, those of the positional encoding (`lappe_vectors`
    [N, k] and `lappe_values` [G, k], `eslappe_vectors` [N, k], `rwse` [N, k]; `sfiformer.data.AddEncodings` adds
    them to a Data) and, for links, `edge_label_index` [2, L]. It returns logits [graphs, nodes or links, outputs].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.head is None or config.outputs is None:
            missing = "head" if config.head is None else "outputs"
            raise ValueError(
                f"{missing} is not set: give it, or fill it in from the data with ModelConfig.fitted"
            )
        self.config = config
        self.encoder = FeatureEncoder(config)
        self.layers = nn.ModuleList(
            GPSLayer(config, last=i == config.layers - 1) for i in range(config.layers)
        )
        self.head = make_head(config)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "SFiFormer":
        """The model of a preset, keys of `ModelConfig` overridden: from_preset("mnist", attention="dfi")."""
        layers = [Layer(source, values.get("model", {})) for source, values in read_preset(name)]
        return cls(build(ModelConfig, [*layers, Layer("overrides", overrides)]))

    def forward(self, batch: Any) -> Tensor:
        structure = self.structure(batch)  # first: what is made ahead may look at it
        with running_ahead(batch.edge_index):
            x, e, structure = self.encoder(batch, structure)
            return self.head(self._states(x, e, structure), structure.graphs, batch)

    def structure(self, batch: Any) -> Structure:
        """What layers need to know about a batch's graphs, whatever the weights: a batch can have it ahead (`structured`)."""
        return self.encoder.structure(batch)

    def embed(self, batch: Any) -> Tensor:
        """Node embeddings [N, d]. In a link model, those whose dot products rank all pairs of a graph."""
        x = self._states(*self.encoder(batch))
        return self.head.embed(x) if isinstance(self.head, LinkHead) else x

    def _states(self, x: Tensor, e: Tensor | None, structure: Structure) -> Tensor:
        for layer in self.layers:
            x, e = layer(x, e, structure)
        return x

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        # Leaves first: a module that initialises its children in its own way comes after them.
        for module in reversed(list(self.modules())):
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    @property
    def num_parameters(self) -> int:
        """The number of parameters, frozen ones included."""
        return sum(parameter.numel() for parameter in self.parameters())

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"{c.layers} layers, dim={c.dim}, heads={c.heads}, local={c.local}, attention={c.attention}, "
            f"{self.num_parameters:,} parameters"
        )


class LoadReport(NamedTuple):
    """What `load_dense` did."""

    loaded: list[str]
    fresh: list[str]

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", key) for key in self.fresh))
        return f"loaded {len(self.loaded)} tensors; started fresh: {', '.join(kinds) or 'none'}"


NOT_IN_TENSORS = ("heads", "activation", "residual", "pooling", "head_activation", "head_l2norm")


def load_dense(
    model: SFiFormer, state: Mapping[str, Tensor], config: ModelConfig | None = None
) -> LoadReport:
    """Start SFi-Former+ from the state of a trained DFi-Former; or another DFi-Former, which is trained on: its control.

    What the two share is loaded into `model`; what only sparse flows have (the friction projections, the
    multiplier of λ*) keeps its fresh values. How λ scales may differ: a dense model has no use for it.

    A state that is not of the model's dense twin is an error, and leaves the model as it was. Settings that no tensor shows
    are looked at where the `config` of the state's model is given.
    """
    if model.config.attention not in ("sfi", "dfi"):
        raise ValueError(
            f"attention is {model.config.attention}; what starts from a DFi-Former has attention: sfi (SFi-Former+) or dfi"
        )
    with torch.device("meta"):
        twin = SFiFormer(replace(model.config, attention="dfi")).state_dict()
    own = model.state_dict()
    twin, state = (_without_friction(values) for values in (twin, state))
    for key in NOT_IN_TENSORS if config is not None else ():
        if getattr(config, key) != getattr(model.config, key):
            raise ValueError(
                f"the state is not of this model's dense twin: its {key} is {getattr(config, key)}, this model's "
                f"{getattr(model.config, key)}"
            )
    if problem := mismatch(twin, state):
        raise ValueError(f"the state is not of this model's dense twin, attention: dfi: {problem}")
    loaded = [key for key in own if key in twin]
    model.load_state_dict({key: state[key] for key in loaded}, strict=False)
    return LoadReport(loaded, [key for key in own if key not in twin])


def _without_friction(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A dense model's state, less the N* of the paper's λ*/N*, of which it has seen none."""
    return {key: value for key, value in state.items() if not key.endswith(".attention.largest")}
