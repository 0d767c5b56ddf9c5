from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from sfiformer import ModelConfig
from sfiformer.nn.heads import MLP, LinkHead, make_head
from sfiformer.nn.partition import Partition

GRAPHS = Partition(torch.tensor([0, 0, 1]), torch.tensor([0, 2, 3]), 2, 2)


def test_hidden_rows_have_unit_length():
    mlp = MLP(4, 2, 2, activation="relu", dropout=0.0, l2norm=True)
    x = torch.randn(3, 4)
    hidden = mlp.hidden[0](x).relu()
    torch.testing.assert_close(mlp(x), mlp.out(hidden / hidden.norm(dim=1, keepdim=True).clamp(min=1e-12)))


def test_peptides_head():
    config = ModelConfig(
        dim=4,
        head="graph",
        outputs=3,
        head_layers=3,
        head_activation="gelu",
        head_dropout=0.5,
        head_l2norm=False,
    )
    head, x = make_head(config).eval(), torch.randn(3, 4)
    pooled = torch.stack([(x[0] + x[1]) / 2, x[2]])
    first, second = head.mlp.hidden
    torch.testing.assert_close(head(x, GRAPHS, None), head.mlp.out(F.gelu(second(F.gelu(first(pooled))))))
    assert not torch.equal(head.train()(x, GRAPHS, None), head.eval()(x, GRAPHS, None))


def test_graph_head_adds():
    head = make_head(ModelConfig(dim=4, head="graph", outputs=3, pooling="add", head_layers=1))
    x = torch.randn(3, 4)
    torch.testing.assert_close(head(x, GRAPHS, None), head.mlp.out(torch.stack([x[0] + x[1], x[2]])))


def test_node_head():
    head = make_head(ModelConfig(dim=4, head="node", outputs=3))
    assert head(torch.randn(3, 4), GRAPHS, None).shape == (3, 3)


def test_link_scores_are_dot_products_of_embeddings():
    head, x = LinkHead(4), torch.randn(3, 4)
    pairs = torch.tensor([[0, 1, 1], [1, 0, 1]])
    scores = head.embed(x) @ head.embed(x).t()
    torch.testing.assert_close(
        head(x, GRAPHS, SimpleNamespace(edge_label_index=pairs)), scores[pairs[0], pairs[1]].unsqueeze(1)
    )
    with pytest.raises(ValueError, match="edge_label_index"):
        head(x, GRAPHS, SimpleNamespace())
