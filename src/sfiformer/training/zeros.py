"""How sparse the attention is."""

from itertools import pairwise

import torch
from torch import Tensor

from sfiformer.attention import SFiAttention
from sfiformer.data.batch import GraphBatch
from sfiformer.flow import flows_from_scores
from sfiformer.nn.model import SFiFormer

TOGETHER = 1 << 23  # flows that are solved for at a time; about fifteen tensors of that size are alive then


@torch.no_grad()
def zero_share(model: SFiFormer, batch: GraphBatch) -> float | None:
    """The share of flows that are exactly zero, over all layers, heads and node pairs of a batch.

    None where the model has no sfi attention: a dense flow has no zeros but those of underflow.
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
        model(batch)
        return _share(inputs, batch.ptr)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()


def _share(inputs: dict[SFiAttention, Tensor], ptr: Tensor) -> float:
    """Of the layers of one model, given their inputs [N, dim].

    For a GPU this is much small work: the flows of a graph are solved for in all layers at once, and counts are read at
    the end. Only the iteration takes one layer at a time, since its random start depends on what it is given.
    """
    layer, *_ = inputs
    scores = zip(*(layer.scores(x) for layer, x in inputs.items()), strict=True)
    parts = [torch.stack(part).transpose(1, 2) for part in scores]  # [layers, heads, N, width]
    strengths = [layer.strengths(ptr, x) for layer, x in inputs.items()]
    lam = torch.stack([torch.as_tensor(each.lam).expand(len(ptr) - 1) for each in strengths])
    _, alpha, scaling, solver = strengths[0]
    most = TOGETHER if solver == "exact" else 1
    zeros, pairs = ptr.new_zeros(()), 0
    for graph, (start, end) in enumerate(pairwise(ptr.tolist())):
        together = max(1, most // max(1, layer.heads * (end - start) ** 2))
        for first in range(0, len(inputs), together):
            some = slice(first, first + together)
            q, k, q_friction, k_friction = (part[some, :, start:end] for part in parts)
            s, u = q @ k.mT * layer.scale, q_friction @ k_friction.mT * layer.scale  # [layers, heads, n, n]
            strength = lam[some, graph, None, None]
            z = flows_from_scores(s, u, lam=strength, alpha=alpha, scaling=scaling, solver=solver)
            zeros += (z == 0).sum()
            pairs += z.numel()
    return int(zeros) / pairs
