"""From the settings of an experiment to data that a model can be trained on."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from os.path import abspath
from pathlib import Path

from torchmetrics import Metric

from sfiformer.config import DataConfig, ExperimentConfig
from sfiformer.data.dataset import Member, ids_of
from sfiformer.data.named import load_dataset
from sfiformer.data.official import find
from sfiformer.data.schema import Schema
from sfiformer.data.source import Bad, digest
from sfiformer.data.standardize import Standardizer
from sfiformer.data.store import GraphStore
from sfiformer.data.task import Task
from sfiformer.errors import UserError
from sfiformer.schema import as_text
from sfiformer.training.inference import model_inputs
from sfiformer.training.losses import Loss
from sfiformer.training.objectives import DATASETS, loss_and_metric

# Settings that say how a file of one's own is read.
OF_A_FILE = (
    *("level", "kind", "smiles_column", "targets", "node_feature_kind", "edge_feature_kind"),
    *("split", "split_column", "fractions", "split_seed", "skip_bad"),
)


@dataclass(frozen=True)
class Prepared:
    """The data of an experiment, ready for its model."""

    config: ExperimentConfig
    """The settings, resolved: what the data settle of the model is filled in, paths are absolute."""
    stores: dict[str, GraphStore]
    """"train" and, where there are any, "val" and "test": standardised, with the encodings the model asks for."""
    task: Task
    schema: Schema
    standardizer: Standardizer | None
    facts: str
    """What was read, in a few lines."""
    members: dict[str, list[Member]] = field(default_factory=dict)
    """The graphs of each split of a user's own file."""
    bad: Bad = field(default_factory=list)
    """Rows of it that were left out."""
    digest: str | None = None
    """Of the user's own file."""

    @property
    def ids(self) -> dict[str, list[str]]:
        """What the user calls them."""
        return ids_of(self.members)

    def names(self, split: str, graphs: Iterable[int]) -> list[str]:
        """What the graphs with these numbers in a split are called."""
        own = self.members.get(split)
        return [own[graph].id if own else str(graph) for graph in graphs]


def prepare(config: ExperimentConfig, *, encode: bool = True, trained: Task | None = None) -> Prepared:
    """Load the data of an experiment, standardise and encode them, and settle what they settle of the model.

    Without `encode` the graphs stay as they were read: enough to tell what would be trained, and quick. `trained` is the
    task of a run that goes on.
    """
    paths = {"root": abspath(config.data.root)}
    if config.data.path is not None:
        paths["path"] = abspath(config.data.path)
    config = replace(config, data=replace(config.data, **paths))  # type: ignore[arg-type]
    if trained is None:  # those of an earlier release may have said anything
        _require_used(config.data)
    dataset = load_dataset(config.data if trained is None else as_trained(config.data, trained), config.seed)
    if config.trainer.patience is not None and "val" not in dataset.splits:
        raise UserError(
            f"trainer.patience is {config.trainer.patience}, but {dataset.name} has no graphs for validation to tell by: "
            "give it some (data.split, data.fractions), or set trainer.patience to null"
        )
    schema = dataset.schema
    model = config.model.fitted(
        level=dataset.task.level,
        outputs=dataset.task.outputs,
        node_features=schema.node.width,
        edge_features=schema.edge.width if schema.edge else 0,
        node_categories=schema.node.sizes,
        edge_categories=schema.edge.sizes if schema.edge else None,
    )
    standardizer, notes = _standardizer(config.data, dataset.splits["train"])
    if "val" not in dataset.splits:
        notes.append("no graphs for validation: the last epoch counts as the best")
    cache = encoding_cache(config)
    data = replace(config.data, standardize=standardizer is not None)
    return Prepared(
        config=replace(config, model=model, data=data),
        stores={
            split: model_inputs(store, model, standardizer, cache) if encode else store
            for split, store in dataset.splits.items()
        },
        task=dataset.task,
        schema=schema,
        standardizer=standardizer,
        facts="\n".join([dataset.describe(), *notes]),
        members=dataset.members,
        bad=dataset.bad,
        digest=digest(config.data.path) if config.data.path is not None else None,
    )


def _require_used(data: DataConfig) -> None:
    """Raises UserError where something is said of a file, and the dataset is one by name."""
    if data.name == "custom":
        return
    name = find(data.name).name
    unsaid = (DataConfig(), DataConfig(split_seed=0))  # the latter as the preset custom has it
    for key in OF_A_FILE:
        value = getattr(data, key)
        if value not in [getattr(settings, key) for settings in unsaid]:
            raise UserError(
                f"data.{key} is {as_text(value)}, but the dataset is {name}, which has no use for it: leave it out, or for "
                "graphs of one's own take the preset custom, or set data.name to custom"
            )


def as_trained(data: DataConfig, task: Task) -> DataConfig:
    """The settings by which a file is read as for a run of this task, whatever would be inferred from it today."""
    # Columns by their names; a run of an earlier release knows those of several targets only.
    targets = data.targets or task.columns or task.target_names
    return replace(data, targets=targets, level=data.level or task.level, kind=data.kind or task.kind)


def encoding_cache(config: ExperimentConfig) -> Path:
    """The folder where the encodings of an experiment's graphs are kept."""
    return Path(config.data.root) / "encodings"


def objective(config: ExperimentConfig, task: Task) -> tuple[Loss, Metric]:
    """The loss that an experiment is trained with and the metric by which it is judged."""
    loss = "weighted_cross_entropy" if config.optim.class_weights else None
    metric = DATASETS[config.data.name][2] if config.data.name in DATASETS else None
    try:
        return loss_and_metric(task, loss, metric)
    except ValueError as error:
        hint = "; set optim.class_weights to false" if loss else ""
        raise UserError(f"{error}{hint}") from None


def _standardizer(config: DataConfig, train: GraphStore) -> tuple[Standardizer | None, list[str]]:
    """What the features are standardised with, if they are, and a line that says so where there are any."""
    fields = [
        name
        for name, tensor in (*train.node.items(), *train.edge.items())
        if name in ("x", "edge_attr") and tensor.is_floating_point()
    ]
    if config.standardize and not fields:
        raise UserError(
            "data.standardize is on, but neither x nor edge_attr holds real numbers; set it to false"
        )
    own, names = config.name == "custom", " and ".join(fields)
    if fields and (config.standardize or (config.standardize is None and own)):
        scaled = (
            f"standardised by the training split: {names} (data.standardize: false leaves them as they are)"
        )
        return Standardizer.fit(train, fields), [scaled]
    return None, [
        f"left as they are: {names} (data.standardize: true standardises them)"
    ] if fields and own else []
