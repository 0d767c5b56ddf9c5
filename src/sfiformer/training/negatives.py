"""Negative links for training a ranking: other tails for the heads of true links."""

import torch
from torch import Tensor


def sample_negatives(links: Tensor, ptr: Tensor, uniform: Tensor) -> Tensor:
    """False links [2, ≤ P·K] with the heads of the true `links` [2, P], K for each.

    `uniform` [P, K], numbers drawn from [0, 1), chooses the tails: uniformly among the nodes of the head's
    graph (ptr[g] … ptr[g+1]-1, batch-global) other than the head and the nodes linked with it in either
    direction, since the score of a link, a dot product, has no direction. A head that is linked with every
    node has no negatives.
    """
    nodes = int(ptr[-1])
    head, tail = links
    # The excluded pairs, by head and then tail.
    pairs = torch.cat([head * nodes + tail, tail * nodes + head, head * nodes + head]).unique()
    excluded_head, excluded_tail = pairs // nodes, pairs % nodes  # [X]
    graph = torch.searchsorted(ptr, torch.arange(nodes, device=ptr.device), right=True) - 1  # [N]
    first = torch.searchsorted(excluded_head, torch.arange(nodes + 1, device=ptr.device))  # [N + 1]
    free = ptr.diff()[graph] - first.diff()  # [N] tails that each head may take

    heads = head.repeat_interleave(uniform.size(1))
    drawable = free[heads] > 0
    heads = heads[drawable]
    k = (uniform.flatten()[drawable] * free[heads]).long()
    # The k-th free node is k plus the number of excluded ones before it: with these sorted, e_0 < e_1 < …,
    # it is the number of i with e_i - i ≤ k. One search over all heads finds it, in each head's own keys.
    order = torch.arange(len(pairs), device=ptr.device) - first[excluded_head]
    keys = excluded_head * (nodes + 1) + excluded_tail - ptr[graph[excluded_head]] - order
    before = torch.searchsorted(keys, heads * (nodes + 1) + k, right=True) - first[heads]
    return torch.stack([heads, ptr[graph[heads]] + k + before])
