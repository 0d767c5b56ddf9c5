"""A model that starts from a dense run is not judged by graphs which that was trained on."""

import json
from dataclasses import replace

import pytest

from sfiformer.config import ExperimentConfig
from sfiformer.errors import UserError
from sfiformer.training import RunFolder, train
from sfiformer.training.inheritance import run_of
from small_runs import SMALL

LEAK = r"graphs of val and test, .* trained on: split as it did .*split_seed: 0"


def lines(count=30, **fields):
    """Graphs of two nodes, no two alike."""
    for i in range(count):
        yield {"x": [[float(i)], [1.0]], "edges": [[0, 1]], "y": i % 2, **fields}


@pytest.fixture
def started(tmp_path):
    """started(graphs): a dense run on them; started.again(**data): the sparse one that starts from it, with these settings."""
    file, dense = tmp_path / "graphs.jsonl", tmp_path / "dense"

    class Started:
        def __call__(self, graphs):
            self.write(graphs)
            settings = {**SMALL, "data.path": str(file), "data.root": str(tmp_path / "root")}
            config = ExperimentConfig.from_preset("custom", {**settings, "model.attention": "dfi"})
            train(config, dense, progress=False)
            self.sparse = replace(config, model=replace(config.model, attention="sfi"))
            return dense

        def write(self, graphs):
            file.write_text("".join(json.dumps(graph) + "\n" for graph in graphs))

        def again(self, init_from=dense, **data):
            out = tmp_path / f"plus-{len(list(tmp_path.iterdir()))}"
            config = replace(self.sparse, data=replace(self.sparse.data, **data))
            return train(config, out, init_from=init_from, progress=False)

    return Started()


def refused(started, *arguments, **data):
    with pytest.raises(UserError, match=LEAK) as caught:
        started.again(*arguments, **data)
    return str(caught.value)


def test_it_is_split_as_the_dense_run_was(started):
    dense = started(lines())
    assert started.again().epochs == 1
    for place in (dense, dense / "best", dense / "checkpoints" / "epoch-0001"):
        assert refused(started, place, split_seed=1).endswith("data.fractions: [0.8, 0.1, 0.1])")
        assert run_of(place).path.samefile(dense)


def test_names_that_all_graphs_share_hide_none(started):
    started(lines(id="CHEMBL"))
    assert started.again().epochs == 1
    refused(started, split_seed=1)


def test_a_file_with_other_rows_is_compared_graph_by_graph(started):
    started(lines())
    started.write([*lines(), {"x": [[99.5], [1.0]], "edges": [[0, 1]], "y": 1}])
    message = refused(started)
    assert message.endswith("), in the file as it was, or take one whose own split keeps them in train")
    started.write({**graph, "x": [[0.5 + i], [2.0]]} for i, graph in enumerate(lines()))
    assert started.again().epochs == 1, "all are others"


def test_nodes_of_one_graph_are_split_as_they_were(started):
    nodes = {"x": [[float(i)] for i in range(40)], "y": [i % 2 for i in range(40)], "edges": [[0, 1]]}
    started([nodes])
    assert started.again().epochs == 1
    refused(started, split_seed=1)


def test_runs_of_earlier_releases_are_compared_by_ids_or_not_at_all(started, recwarn):
    dense = started({**graph, "id": f"g{i}"} for i, graph in enumerate(lines()))
    table = dense / "splits.csv"
    named = [line.rsplit(",", 2)[0] for line in table.read_text().splitlines()]
    table.write_text("\n".join(named))
    assert RunFolder(dense).members()["train"][0].row is None
    assert started.again().epochs == 1
    refused(started, split_seed=1)
    started.write([*({**graph, "id": f"g{i}"} for i, graph in enumerate(lines())), *lines(1)])
    refused(started)
    assert not [warning for warning in recwarn if "earlier release" in str(warning.message)]

    table.write_text("\n".join(line.removeprefix("g") for line in named))  # ids, or places
    with pytest.warns(UserWarning, match=r"splits\.csv, of an earlier release, does not tell"):
        started.again()
