"""Features of zero mean and unit variance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfiformer.data.store import GraphStore

ROWS = 1 << 20  # taken at a time, so that no copy in float64 of a whole field is made


@dataclass(frozen=True)
class Standardizer:
    """(v − mean) / std of each column of some fields, with the training split's mean and standard deviation.

    A column that is constant in the training split keeps its scale: it is shifted by its mean alone.
    """

    mean: dict[str, Tensor]  # each [F] float32
    std: dict[str, Tensor]  # each [F] float32

    @classmethod
    def fit(cls, train: GraphStore, fields: Sequence[str] = ("x", "edge_attr")) -> Standardizer:
        """Measures the floating-point node and edge fields named in `fields`."""
        moments = {name: _moments(_field(train, name), name) for name in fields}
        return cls(
            mean={name: mean.float() for name, (mean, _) in moments.items()},
            std={name: std.float() for name, (_, std) in moments.items()},
        )

    def apply(self, store: GraphStore) -> GraphStore:
        """The store with the fields standardised; the given one is left as it is."""

        def scaled(fields: dict[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: (fields[name].float() - self.mean[name].to(store.device))
                / self.std[name].to(store.device)
                for name in self.mean
                if name in fields
            }

        for name in self.mean:
            _field(store, name)
        return store.with_fields(node=scaled(store.node), edge=scaled(store.edge))


def _field(store: GraphStore, name: str) -> Tensor:
    tensor = store.node.get(name, store.edge.get(name))
    if tensor is None:
        known = ", ".join([*store.node, *store.edge])
        raise ValueError(f"the store has no node or edge field '{name}' to standardise; it has {known}")
    return tensor


def _moments(tensor: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if not tensor.is_floating_point():
        raise ValueError(f"'{name}' holds {tensor.dtype}: only floating-point features can be standardised")
    rows = max(tensor.size(0), 1)
    mean = sum(part.double().sum(0) for part in tensor.split(ROWS)) / rows
    variance = sum(((part.double() - mean) ** 2).sum(0) for part in tensor.split(ROWS)) / rows
    std = torch.as_tensor(variance).sqrt()
    # By the column's own scale, be it nanometres in metres; below 1e-30 float32 has no room for the quotient.
    varies = std > 1e-12 * torch.as_tensor(mean).abs() + 1e-30
    return torch.as_tensor(mean), torch.where(varies, std, 1.0)
