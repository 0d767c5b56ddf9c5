"""States of width d from node or edge features: real ones, categories, or none."""

import torch
from torch import Tensor, nn

# Sizes of OGB's vocabularies. Atoms: atomic number, chirality, degree, charge, hydrogens, radical electrons,
# hybridisation, aromatic, in a ring. Bonds: type, stereo, conjugated.
ATOM_VOCABULARY = (119, 5, 12, 12, 10, 6, 6, 2, 2)
BOND_VOCABULARY = (5, 6, 2)

PRODUCT_ROWS = 1024  # of tables that a GPU multiplies with: beyond, most of the product would be zeros


class LinearEncoder(nn.Linear):
    """Linear on real features of any dtype: [K, in_features] (or [K] for one) → [K, out_features]."""

    def __init__(self, in_features: int, out_features: int, field: str) -> None:
        super().__init__(in_features, out_features)
        self.field = field

    def forward(self, features: Tensor) -> Tensor:
        if features.dim() == 1:
            features = features.unsqueeze(1)
        if features.dim() != 2 or features.size(1) != self.in_features:
            raise ValueError(
                f"{self.field} has shape {list(features.shape)}; the model takes {self.in_features} columns"
            )
        return super().forward(features.to(self.weight.dtype))


class EmbeddingSum(nn.Module):
    """Σ_c table_c[features_c] over the columns c of categorical features: [K, columns] integer → [K, dim].

    The tables lie one below the other in one, so that all columns are one lookup. On a GPU the lookup is a matrix product:
    the gradient of a lookup sums all K rows into a few rows of the table one after the other.
    """

    sizes: Tensor  # [columns]
    offsets: Tensor  # [columns], first row of each column's table
    column_of: Tensor  # [rows] of the tables: its column
    value_of: Tensor  # [rows], and the value it stands for

    def __init__(self, vocabulary: tuple[int, ...], dim: int, field: str) -> None:
        super().__init__()
        self.vocabulary, self.field = vocabulary, field
        sizes = torch.tensor(vocabulary)
        self.register_buffer("sizes", sizes, persistent=False)
        self.register_buffer("offsets", sizes.cumsum(0) - sizes, persistent=False)
        rows = [(column, value) for column, size in enumerate(vocabulary) for value in range(size)]
        column_of, value_of = torch.tensor(rows).unbind(1)
        self.register_buffer("column_of", column_of.contiguous(), persistent=False)
        self.register_buffer("value_of", value_of.contiguous(), persistent=False)
        self.tables = nn.EmbeddingBag(sum(vocabulary), dim, mode="sum")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.tables.weight.data.split(self.vocabulary):
            nn.init.xavier_uniform_(table)

    def forward(self, features: Tensor, hot: Tensor | None = None) -> Tensor:
        """``hot`` is what `hot` makes of the features, if that has been done."""
        hot = self.hot(features) if hot is None else hot
        if hot is not None:
            with torch.autocast(hot.device.type, enabled=False):  # as exact as a lookup
                return hot @ self.tables.weight
        features = features.long()
        self._check(features)
        return self.tables(features + self.offsets)

    def hot(self, features: Tensor) -> Tensor | None:
        """[K, rows] of what the tables are multiplied with: 1 where the row stands for its column's value, 0 elsewhere.

        None where they are looked up.
        """
        if features.dim() != 2 or features.size(1) != len(self.vocabulary) or features.is_floating_point():
            raise ValueError(
                f"{self.field} has shape {list(features.shape)} and dtype {features.dtype}; the model takes "
                f"{len(self.vocabulary)} columns of integers"
            )
        if not self._multiplies(features):
            return None
        hot = features.float().index_select(1, self.column_of).eq_(self.value_of)
        # A value out of its column's range has no row.
        torch._assert_async(hot.sum(dtype=torch.int64) == features.numel())
        return hot.to(self.tables.weight.dtype)

    def _multiplies(self, features: Tensor) -> bool:
        return features.is_cuda and len(self.column_of) <= PRODUCT_ROWS

    def _check(self, features: Tensor) -> None:
        # A value out of its column's range would read the next column's table in silence.
        inside = (features >= 0) & (features < self.sizes)
        if features.device.type != "cpu" or torch.compiler.is_compiling():
            torch._assert_async(inside.all())  # does not wait for the device, nor branch on values
        elif not inside.all():
            row, column = (~inside).nonzero()[0].tolist()
            raise ValueError(
                f"{self.field}[{row}, {column}] is {int(features[row, column])}; column {column} takes 0 to "
                f"{self.vocabulary[column] - 1}"
            )

    def extra_repr(self) -> str:
        return f"vocabulary={self.vocabulary}"


class ConstantEncoder(nn.Module):
    """One learned row for all nodes, or all edges, that have no features."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.empty(1, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.row)

    def forward(self, count: int) -> Tensor:
        return self.row.expand(count, -1)

    def extra_repr(self) -> str:
        return str(self.row.size(1))
