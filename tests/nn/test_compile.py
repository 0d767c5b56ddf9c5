"""torch.compile takes the whole model as one graph, for batches of all sizes."""

import numpy as np
import pytest
import torch

from sfiformer import SFiFormer
from sfiformer.data import GraphStore
from sfiformer.data.shapes import Ladder
from sfiformer.nn.features import ATOM_VOCABULARY, BOND_VOCABULARY

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SIZES = (9, 14, 20, 12, 17, 11)  # nodes


@pytest.fixture
def store():
    """Rings with the features of molecules."""
    rng, nodes = np.random.default_rng(0), sum(SIZES)
    rings = [np.stack([np.arange(size), (np.arange(size) + 1) % size]) for size in SIZES]
    edges = np.concatenate([np.concatenate([ring, ring[::-1]], axis=1) for ring in rings], axis=1)
    ptr = np.concatenate([[0], np.cumsum(SIZES)])
    return GraphStore(
        node_ptr=torch.from_numpy(ptr),
        edge_ptr=torch.from_numpy(2 * ptr),
        edge_index=torch.from_numpy(edges),
        node={
            "x": torch.from_numpy(rng.integers(0, ATOM_VOCABULARY, (nodes, len(ATOM_VOCABULARY)))),
            "lappe_vectors": torch.from_numpy(rng.standard_normal((nodes, 10), dtype=np.float32)),
        },
        edge={"edge_attr": torch.from_numpy(rng.integers(0, BOND_VOCABULARY, (2 * nodes, 3)))},
        graph={"lappe_values": torch.from_numpy(rng.random((len(SIZES), 10), dtype=np.float32))},
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_one_graph_serves_padded_batches_of_all_sizes(store, device):
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0, "sign_flip": False}
    torch.manual_seed(0)
    model = SFiFormer.from_preset("peptides-func", layers=1, dim=12, heads=2, pe_dim=4, **quiet).to(device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    ladder = Ladder(store, 3)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def run(call, batch):
        model.load_state_dict(state)
        out = call(batch)
        gradients = torch.autograd.grad(
            out.square().sum(), [p for p in model.parameters() if p.requires_grad]
        )
        return [out.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]

    shapes = set()

    def check(graphs):
        shape = ladder.shape(np.array(graphs))
        shapes.add((shape.graphs, shape.nodes, shape.edges))
        batch = store.batch(graphs, shape).to(device)
        for left, right in zip(run(model, batch), run(compiled, batch), strict=True):
            torch.testing.assert_close(left, right)

    check([1, 2, 4])  # a first batch with as many nodes as edges would tie the two numbers
    with torch.compiler.set_stance("fail_on_recompile"):
        check([0])
        check([3, 5])
    assert len(shapes) > 1


def test_a_value_out_of_range_is_still_found(store):
    model = SFiFormer.from_preset("peptides-func", layers=1, dim=12, heads=2, pe_dim=4).eval()
    compiled = torch.compile(model.encoder.node, fullgraph=True, backend="aot_eager")
    features = store.batch([0]).x
    torch.testing.assert_close(compiled(features), model.encoder.node(features))
    with pytest.raises(RuntimeError):
        compiled(features.new_full(features.shape, 119))
