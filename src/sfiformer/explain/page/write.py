"""Writes the page: the record of a graph beside the style and the scripts of this folder, in one file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import torch

from sfiformer.explain.molecule import layout
from sfiformer.explain.page.layout import spring_layout
from sfiformer.explain.page.said import said
from sfiformer.files import whole_file

if TYPE_CHECKING:
    from sfiformer.explain.record import GraphRecord, LayerRecord

_SCRIPTS = (
    "solver.js",
    "record.js",
    "colours.js",
    "view.js",
    "main.js",
    "address.js",
    "gestures.js",
    "start.js",
)


def write_page(
    record: GraphRecord,
    path: Path,
    *,
    title: str | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> Path:
    """Write the flows of a graph as one HTML file that works offline, and return its path.

    The file holds queries and keys, not maps: the page computes the scores of a query when it is asked for, and solves for
    its flows at any λ. Nothing in it can reach a network, and no text of the record can become code.

    Args:
        record: of one graph.
        path: of the file; what is there is replaced.
        title: in place of the record's own.
        layer, head: shown at first, from 1; None for the first layer, and for the mean over the heads.

    Raises:
        ValueError: where a query or key is not finite.
    """
    style, script = _read("page.css"), "\n".join(map(_read, _SCRIPTS))
    layers = [
        f'<script type="text/plain" id="layer-{number}-head-{head}">{content}</script>'
        for number, layer in enumerate(record.layers)
        for head, content in enumerate(_packed(number, layer))
    ]
    page = Template(_read("page.html")).substitute(
        policy=f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'",
        title=html.escape(title or record.title),
        style=style,
        script=script,
        record=_embedded(_content(record) | {"view": f"#layer={layer or 1}&head={head or 'mean'}"}),
        layers="\n".join(layers),
    )
    with whole_file(Path(path)) as file:
        file.write(page.encode())
    return Path(path)


def _content(record: GraphRecord) -> dict:
    """All but the queries and keys."""
    molecule = layout(record)
    if molecule is not None:
        positions, edges = molecule.positions.tolist(), [list(bond) for bond in molecule.bonds]
    else:
        ends = record.edge_index.sort(0).values.unique(dim=1)  # [2, edges], each once whichever way it points
        edges = [[a, b, 1] for a, b in ends.t().tolist() if a != b]
        own = record.positions
        positions = (spring_layout(record.edge_index, record.num_nodes) if own is None else own).tolist()
    symbols = record.node_labels
    row, column = record.adjacency.nonzero(as_tuple=True)
    facts = [f"{record.num_nodes} nodes", f"{len(edges)} edges", f"{record.task.level} {record.task.kind}"]
    return {
        "facts": " · ".join(facts),
        "labels": [f"node {i}" if symbols is None else f"{symbols[i]} {i}" for i in range(record.num_nodes)],
        "positions": [[round(x, 4), round(y, 4)] for x, y in positions],
        "edges": edges,
        "molecule": None if molecule is None else molecule.labels,
        "adjacency": {
            "row": row.tolist(),
            "column": column.tolist(),
            "weight": _base64(record.adjacency[row, column]),
        },
        "layers": [_settings(layer) for layer in record.layers],
        "said": said(record),
    }


def _settings(layer: LayerRecord) -> dict:
    return {
        "heads": layer.heads,
        "width": layer.q.shape[-1],
        "scale": layer.scale,
        "lam": layer.lam,
        "alpha": layer.alpha if math.isfinite(layer.alpha) else None,  # JSON knows no infinity
        "scaling": layer.scaling,
        "gamma": layer.gamma,
    }


def _packed(number: int, layer: LayerRecord) -> list[str]:
    """For each head its q, k, q̃ and k̃, [4, n, width] float32."""
    parts = torch.stack([layer.q, layer.k, layer.q_friction, layer.k_friction])  # [4, n, heads, width]
    if not bool(parts.isfinite().all()):
        raise ValueError(
            f"layer {number} has queries or keys that are not finite: the model has diverged; use a checkpoint from before"
        )
    return [_base64(head) for head in parts.permute(2, 0, 1, 3)]


def _base64(x: torch.Tensor) -> str:
    """float32, the least significant byte first, as all browsers have it."""
    return base64.b64encode(x.contiguous().numpy().astype("<f4").tobytes()).decode()


def _embedded(content: dict) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(content: str) -> str:
    """What a Content-Security-Policy calls this very text by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
