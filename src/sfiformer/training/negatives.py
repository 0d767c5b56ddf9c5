"""Negative links for training a ranking: other tails for the heads of true links."""

import torch
from torch import Tensor


def sample_negatives(
    links: Tensor, true: Tensor, ptr: Tensor, nodes: int, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """False links with the heads of the true ones, K for each.

    `links` [2, L], of which those in `true` [L] are true. `uniform` [L, K], numbers drawn from [0, 1), chooses
    the tails: uniformly among the nodes of the head's graph (ptr[g] … ptr[g+1]-1, batch-global, `nodes` in
    all) other than the head and the nodes truly linked with it in either direction, since the score of a link,
    a dot product, has no direction.

    Returns:
        pairs [2, L·K], and which of them are negatives [L·K]: not those of links that are not true, nor of
        heads that are linked with every node. Shapes depend on no values, and nothing waits for a device.
    """
    head, tail = links
    nobody = nodes * nodes  # sorts after every pair
    pairs = torch.cat([head * nodes + tail, tail * nodes + head, head * nodes + head])
    pairs = torch.where(true.repeat(3), pairs, nobody).sort().values
    again = torch.cat([true.new_zeros(min(1, len(pairs))), pairs[1:] == pairs[:-1]])
    # The excluded pairs, by head and then tail, each once, and `nobody` after them.
    pairs = torch.where(again, nobody, pairs).sort().values  # [X]
    excluded_head, excluded_tail = pairs // nodes, pairs % nodes
    count = torch.arange(max(nodes + 1, len(pairs)), device=ptr.device)
    graph = torch.searchsorted(ptr, count[: nodes + 1], right=True).clamp(max=len(ptr) - 1) - 1  # [N + 1]
    first = torch.searchsorted(excluded_head, count[: nodes + 1])  # [N + 1]
    free = ptr.diff()[graph[:-1]] - first.diff()  # [N] tails that each head may take

    heads = head.repeat_interleave(uniform.size(1), output_size=uniform.numel())
    drawable = true.repeat_interleave(uniform.size(1), output_size=uniform.numel()) & (free[heads] > 0)
    k = (uniform.flatten() * free[heads]).long()
    # The k-th free node is k plus the number of excluded ones before it: with these sorted, e_0 < e_1 < …,
    # it is the number of i with e_i - i ≤ k. One search over all heads finds it, in each head's own keys.
    order = count[: len(pairs)] - first[excluded_head]
    keys = excluded_head * (nodes + 1) + excluded_tail - ptr[graph[excluded_head]] - order
    keys = torch.where(pairs < nobody, keys, (nodes + 1) ** 2)
    before = torch.searchsorted(keys, heads * (nodes + 1) + k, right=True) - first[heads]
    tails = ptr[graph[heads]] + k + before
    return torch.stack([heads, torch.where(drawable, tails, heads)]), drawable
