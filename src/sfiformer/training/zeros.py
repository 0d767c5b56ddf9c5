"""How sparse the attention is."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from sfiformer.attention import SFiAttention
from sfiformer.data.batch import GraphBatch
from sfiformer.flow import flows_from_scores
from sfiformer.nn.model import SFiFormer

# Flows that are solved for at a time, in float64; about fifteen tensors of that size are alive then.
TOGETHER = 1 << 22
QUERIES = 1024  # of a graph that are looked at, evenly spread, where it has more


@torch.no_grad()
def zero_share(
    model: SFiFormer, batch: GraphBatch, *, autocast: Callable[[], AbstractContextManager] = nullcontext
) -> float | None:
    """The share of flows that are exactly zero, over all layers, heads and node pairs of a batch (of large graphs some rows).

    Zero is what friction stops, not what underflows: exact flows are solved for in float64, where it takes scores that range
    over 700 and more. `autocast` is for the model, whose kernels then are those of its training. None where the model has no
    sfi attention.
    """
    layers = [m for m in model.modules() if isinstance(m, SFiAttention) and m.attention and m.mode == "sfi"]
    if not layers or batch.num_nodes == 0:
        return None
    inputs: dict[SFiAttention, Tensor] = {}

    def keep(layer: SFiAttention, given: tuple[Tensor, ...]) -> None:
        inputs[layer] = given[0].to(layer.value.weight.dtype)

    hooks = [layer.register_forward_pre_hook(keep) for layer in layers]
    training = model.training
    try:
        model.eval()
        with autocast():
            model(batch)
        if layers[0].solver == "exact":
            return _exact(inputs, batch.ptr)
        return _iterated(inputs, batch.ptr)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()


def _exact(inputs: dict[SFiAttention, Tensor], ptr: Tensor) -> float:
    """Of the layers of one model, given their inputs [N, dim].

    For a GPU this is much small work: the flows of all graphs and layers are solved for at once, graphs padded to the size of
    the largest, as far as there is room; and counts are read at the end.
    """
    layer, *_ = inputs
    scores = zip(*(layer.scores(x) for layer, x in inputs.items()), strict=True)
    parts = [torch.stack(part).transpose(1, 2) for part in scores]  # [layers, heads, N, width]
    strengths = [layer.strengths(ptr, x) for layer, x in inputs.items()]
    lam = torch.stack([torch.as_tensor(each.lam).expand(len(ptr) - 1) for each in strengths])
    _, alpha, scaling, _ = strengths[0]
    sizes = ptr.diff()
    numbers, matrices = sizes.tolist(), len(inputs) * layer.heads
    last = sum(numbers) - 1  # node: what is read beyond a graph is left out later
    zeros, pairs = ptr.new_zeros(()), sum(matrices * min(n, QUERIES) * n for n in numbers)
    for graphs in _groups(numbers, matrices):
        own, starts, largest = sizes[graphs, None], ptr[graphs, None], max(numbers[graphs])
        place = torch.arange(largest, device=ptr.device)
        inside, keys = place < own, (starts + place).clamp(max=last)  # [graphs, n]
        k, k_friction = (part[:, :, keys].mT for part in parts[1::2])
        for some in place[:QUERIES].split(max(1, TOGETHER // (matrices * len(own) * largest))):
            is_query = some < own
            queries = (starts + torch.where(own > QUERIES, some * own // QUERIES, some)).clamp(max=last)
            q, q_friction = (part[:, :, queries] for part in parts[::2])
            s, u = (x @ y * layer.scale for x, y in ((q, k), (q_friction, k_friction)))
            z = flows_from_scores(
                s.double(),  # [layers, heads, graphs, queries, n]
                u.double(),
                lam=lam[:, None, graphs, None],
                alpha=alpha,
                scaling=scaling,
                mask=inside[:, None, :].expand_as(s),
            )
            zeros += ((z == 0) & is_query[:, :, None] & inside[:, None, :]).sum()
    return int(zeros) / pairs


def _groups(sizes: list[int], matrices: int) -> list[slice]:
    """All graphs at once, or where there is no room for that one after the other."""
    if len(sizes) * matrices * min(max(sizes), QUERIES) * max(sizes) <= TOGETHER:
        return [slice(0, len(sizes))]
    return [slice(graph, graph + 1) for graph, size in enumerate(sizes) if size]


def _iterated(inputs: dict[SFiAttention, Tensor], ptr: Tensor) -> float:
    """Likewise for the paper's iteration, whose random start depends on what it is given: as the layers give it."""
    zeros = pairs = 0
    for layer, x in inputs.items():
        flows = layer.flows(x, ptr)
        zeros += sum(int((z == 0).sum()) for z in flows)
        pairs += sum(z.numel() for z in flows)
    return zeros / pairs
