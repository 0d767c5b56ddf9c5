"""Mean reciprocal ranks of true links (PCQM-Contact)."""

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

Variant = Literal["raw", "filtered", "filtered_self"]
VARIANTS: tuple[Variant, ...] = ("raw", "filtered", "filtered_self")


class LinkMRR(Metric):
    """The mean over the graphs of the mean over a graph's true links (h, t) of 1/rank of t.

    The score of tail j is x_h·x_j, and t is ranked among the nodes j ≠ t of the graph: all of them ("raw"),
    those that are not other true tails of h ("filtered"), of these all but h itself ("filtered_self"). With
    `above` of them scoring more than t and `equal` scoring the same, the rank is 1 + above + equal/2, the
    mean of the best and the worst order of ties. Graphs without true links do not count.
    """

    higher_is_better = True
    full_state_update = False
    totals: Tensor
    graphs: Tensor

    def __init__(self, variant: Variant = "raw") -> None:
        super().__init__()
        self.variant = variant
        self.name = "mrr" if variant == "raw" else f"mrr_{variant}"
        # All variants are kept at once, so that a MetricCollection of the three updates only one of them.
        self.add_state("totals", default=torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("graphs", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, x: Tensor, links: Tensor, ptr: Tensor, label: Tensor | None = None) -> None:
        """x: [N, d] node outputs; links: [2, L] batch-global ids; ptr: [G + 1]; label: [L], 1: true."""
        if label is not None:
            links = links[:, label.reshape(-1) == 1]
        reciprocal, graph = reciprocal_ranks(x.detach(), links, ptr)  # [L, 3], [L]
        links_of = torch.bincount(graph, minlength=len(ptr) - 1)  # [G]
        self.totals += (reciprocal.double() / links_of[graph, None]).sum(0)
        self.graphs += (links_of > 0).sum()

    def compute(self) -> float:
        return float(self.totals[VARIANTS.index(self.variant)] / self.graphs)


def link_mrrs() -> MetricCollection:
    """The three variants under their names."""
    return MetricCollection({metric.name: metric for metric in map(LinkMRR, VARIANTS)})


def reciprocal_ranks(x: Tensor, links: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """1/rank of each true link in each variant, [L, 3] float64, and the graph of each link [L]."""
    head, tail = links
    graph = torch.searchsorted(ptr, head.contiguous(), right=True) - 1  # [L]
    size, start = ptr.diff()[graph], ptr[graph]
    width = int(ptr.diff().max()) if len(ptr) > 1 else 0
    other = torch.arange(width, device=x.device)  # local ids
    inside = other < size[:, None]  # [L, n]
    index = (start[:, None] + other).clamp(max=len(x) - 1)  # [L, n]
    scores = torch.einsum("ld,lnd->ln", x[head], x[index])  # [L, n]
    local_head, local_tail = head - start, tail - start

    true_tails = torch.zeros(len(x), width, dtype=torch.bool, device=x.device)  # [N, n]: tails of each head
    true_tails[head, local_tail] = True
    raw = inside & (other != local_tail[:, None])
    filtered = inside & ~true_tails[head]
    candidates = torch.stack([raw, filtered, filtered & (other != local_head[:, None])])  # [3, L, n]

    own = scores.gather(1, local_tail[:, None])  # [L, 1]
    above = (candidates & (scores > own)).sum(-1)  # [3, L]
    equal = (candidates & (scores == own)).sum(-1)
    return (1 / (1 + above + equal.double() / 2)).T, graph
