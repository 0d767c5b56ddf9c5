"""Batch normalisation over two processes (gloo) is that of one."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F

from sfiformer import ranks
from sfiformer.nn.norms import BatchNorm

COUNTS, PADDINGS = (6, 1), (2, 4)  # rows of either rank


def _norm():
    norm = BatchNorm(4).double()
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    return norm


def _rows():
    """x and the gradient of the output, [7, 4], of both ranks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, sum(COUNTS), 4, generator=generator, dtype=torch.float64) * 3 + 7


def _work(rank, rendezvous, expected):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    norm = _norm()
    ranks.join(norm)
    x, grad = _rows()
    part = slice(rank * COUNTS[0], rank * COUNTS[0] + COUNTS[rank])
    x, grad = (F.pad(values[part], (0, 0, 0, PADDINGS[rank]), value=1e30) for values in (x, grad))
    out = norm(x.requires_grad_(), rows=torch.tensor(COUNTS[rank]))
    out.backward(grad)
    ranks.sum_gradients(norm.parameters())
    of_x = x.grad[: COUNTS[rank]]
    found = [out[: COUNTS[rank]].detach(), of_x, norm.weight.grad, norm.bias.grad, norm.state_dict()]
    expected = [value[part] if i < 2 else value for i, value in enumerate(expected)]
    torch.testing.assert_close(found, expected)
    dist.destroy_process_group()


def test_two_ranks_with_padding_equal_one_without(tmp_path):
    norm = _norm()
    x, grad = _rows()
    out = norm(x.requires_grad_())
    out.backward(grad)
    expected = [out.detach(), x.grad, norm.weight.grad, norm.bias.grad, dict(norm.state_dict())]
    mp.spawn(_work, args=(tmp_path / "rendezvous", expected), nprocs=2)
