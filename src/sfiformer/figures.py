"""The look that all static figures share, and how they are saved."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfiformer.files import whole_file

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

# Blue, vermilion, green, purple, orange, sky: told apart by the colour-blind too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sfiformer",  # the same figure gives the same file
}


@contextmanager
def styled() -> Iterator[None]:
    """Figures made inside have the project's look."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context({**STYLE, "axes.prop_cycle": cycler(color=COLOURS)}):
        yield


def map_colours() -> "Colormap":
    """Viridis for flows on a logarithmic scale; NaN, which stands for an exact zero, is white."""
    import matplotlib

    return matplotlib.colormaps["viridis"].with_extremes(bad="white")


def save(figure: "Figure", stem: Path) -> list[Path]:
    """Write stem.png and stem.svg, each whole or not at all."""
    paths = []
    for kind in ("png", "svg"):
        content = io.BytesIO()
        with styled():  # matplotlib reads some settings only now
            figure.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        path = stem.with_name(f"{stem.name}.{kind}")
        with whole_file(path) as file:
            file.write(content.getvalue())
        paths.append(path)
    return paths
