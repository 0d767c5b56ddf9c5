"""Two processes over gloo compute what one does, also when one of them saw nothing."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sfiformer.training import metrics
from sfiformer.training.mrr import LinkMRR


def build():
    return [metrics.macro_f1(3), metrics.average_precision(3), metrics.MAE(), LinkMRR()]


def feed(made, part):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(12, 3, generator=generator)
    classes = torch.randint(0, 3, (12,), generator=generator)
    labels = torch.randint(0, 2, (12, 3), generator=generator).float()
    links, ptr = torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 4])
    f1, ap, mae, mrr = made
    f1.update(logits[part], classes[part])
    mae.update(logits[part], labels[part])
    mrr.update(logits[part][:4], links, ptr)
    if part.start == 0:
        ap.update(logits[part], labels[part])


def work(rank, rendezvous, expected):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    made = build()
    feed(made, [slice(0, 5), slice(5, 12)][rank])
    torch.testing.assert_close([metric.compute() for metric in made], expected)
    dist.destroy_process_group()


def test_two_ranks_equal_one(tmp_path):
    made = build()
    for part in (slice(0, 5), slice(5, 12)):
        feed(made, part)
    expected = [metric.compute() for metric in made]
    mp.spawn(work, args=(tmp_path / "rendezvous", expected), nprocs=2)
