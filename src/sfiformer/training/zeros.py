"""How sparse the attention is."""

import torch
from torch import Tensor

from sfiformer.attention import SFiAttention
from sfiformer.data.batch import GraphBatch
from sfiformer.nn.model import SFiFormer


@torch.no_grad()
def zero_share(model: SFiFormer, batch: GraphBatch) -> float | None:
    """The share of flows that are exactly zero, over all layers, heads and node pairs of a batch.

    None where the model has no sfi attention: a dense flow has no zeros but those of underflow.
    """
    layers = [m for m in model.modules() if isinstance(m, SFiAttention) and m.attention and m.mode == "sfi"]
    if not layers or batch.num_nodes == 0:
        return None
    zeros, pairs = 0, 0

    def count(layer: SFiAttention, inputs: tuple[Tensor, ...]) -> None:
        nonlocal zeros, pairs
        for flows in layer.flows(inputs[0].to(layer.value.weight.dtype), batch.ptr):  # [heads, n, n]
            zeros += int((flows == 0).sum())
            pairs += flows.numel()

    hooks = [layer.register_forward_pre_hook(count) for layer in layers]
    training = model.training
    try:
        model.eval()
        model(batch)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return zeros / pairs
