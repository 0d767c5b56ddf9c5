"""The settings of an experiment: model, data, optimisation, training run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import expanduser
from typing import Any, Literal

import yaml

from sfiformer.nn.config import Level, ModelConfig
from sfiformer.presets import read_preset
from sfiformer.schema import Layer, build, expand, flat, plain, require_choices


@dataclass(frozen=True)
class DataConfig:
    """Which graphs, from where, in which portions."""

    name: str = "custom"
    """One of the datasets by name, or custom for a file of one's own."""
    root: str = "data-root"
    """Folder for downloads and caches."""
    mirror: str | None = None
    """Folder or URL that holds the official archives, in place of the official links."""
    size: Literal["full", "small"] = "full"
    """small: a quick set of a few hundred graphs, for the datasets that can be generated."""
    path: str | None = None
    """File of one's own graphs: PyG .pt, JSON lines, or a CSV of SMILES."""
    level: Level | None = None
    """What the targets in that file belong to; null: inferred."""
    kind: Literal["classification", "binary", "multilabel", "regression", "ranking"] | None = None
    """What the targets are; null: inferred."""
    smiles_column: str | None = None
    """Column of a CSV that holds the SMILES; null: inferred."""
    targets: tuple[str, ...] | None = None
    """Columns of a CSV that hold the targets; null: inferred."""
    node_feature_kind: Literal["numbers", "categories"] | None = None
    """How integer node features are read; null: inferred."""
    edge_feature_kind: Literal["numbers", "categories"] | None = None
    """How integer edge features are read; null: inferred."""
    split: Literal["auto", "column", "masks", "random", "scaffold"] = "auto"
    """How a file is split; auto: by its own column or node masks where it has them, else at random."""
    split_column: str = "split"
    """Column (or key of a graph) that says train, val or test."""
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    """Shares of train, validation and test in a random or scaffold split."""
    split_seed: int | None = None
    """Of a random split, so that runs with other seeds share its test graphs; null: the run's own seed."""
    skip_bad: bool = False
    """Leave out rows that cannot be read, and list them in the run's skipped.csv, instead of stopping."""
    standardize: bool | None = None
    """Shift and scale float node and edge features by the training split's mean and standard deviation; null: yes
    for files of your own, no for the benchmarks."""
    batch_size: int = 32
    """Graphs a training step, over all devices."""

    def __post_init__(self) -> None:
        require_choices(self, "data.")
        for key in ("path", "root", "mirror"):  # as a shell does, which sees none of what a file says
            if (value := getattr(self, key)) is not None:
                object.__setattr__(self, key, expanduser(value))
        if self.batch_size < 1:
            raise ValueError(f"data.batch_size is {self.batch_size}; it must be at least 1")
        if self.split_seed is not None:
            _require_seed("data.split_seed", self.split_seed)
        if not (min(self.fractions) >= 0 and abs(sum(self.fractions) - 1) <= 1e-6):
            raise ValueError(
                f"data.fractions are {list(self.fractions)}; they must not be negative and sum to 1"
            )


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, linear warm-up by epochs, then half a cosine to 0."""

    lr: float = 1e-3
    """Learning rate after the warm-up."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    warmup_epochs: int = 5
    """Epochs over which the learning rate rises from 0."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; longer ones are scaled down."""
    average: float = 0.0
    """Measure and keep a running average of the weights, of about the last 1/(1 − average) steps (0.999: a thousand); 0: the
    weights themselves."""
    class_weights: bool = False
    """Weight class c by (V − n_c)/V, its share of a batch's V labels that it does not have."""

    def __post_init__(self) -> None:
        for key in ("lr", "clip_norm"):
            if not getattr(self, key) > 0:
                raise ValueError(f"optim.{key} is {getattr(self, key)}; it must be positive")
        for key in ("lr", "weight_decay"):
            if math.isinf(getattr(self, key)):
                raise ValueError(f"optim.{key} is infinite; it must be a number")
        for key in ("weight_decay", "warmup_epochs"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"optim.{key} is {getattr(self, key)}; it must not be negative")
        if not 0 <= self.average < 1:
            raise ValueError(f"optim.average is {self.average}; it must be at least 0 and less than 1")


@dataclass(frozen=True)
class TrainerConfig:
    """How long, and on what."""

    epochs: int = 100
    """Passes over the training split."""
    patience: int | None = None
    """Stop after so many epochs without a better validation score; null: never."""
    accumulate: int = 1
    """Batches whose gradients are added up for one step."""
    checkpoint_steps: int | None = None
    """Also write a checkpoint every so many steps of an epoch; null: at the end of each epoch only."""
    measure_zeros: bool = True
    """Measure the share of zero flows in sfi attention, on a few graphs, after each epoch."""
    precision: Literal["32", "tf32", "bf16-mixed"] = "32"
    """Arithmetic of the forward and backward pass; tf32: float32 with products in TF32, on a GPU that has them."""
    capture: bool = True
    """Replay training steps and evaluation as CUDA graphs, on one GPU that holds the data."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """What to run on; auto: GPUs where there are any."""
    devices: int = 1
    """Processes (GPUs, where there are any) on each machine."""
    nodes: int = 1
    """Machines."""

    def __post_init__(self) -> None:
        require_choices(self, "trainer.")
        for key in ("epochs", "accumulate", "devices", "nodes"):
            if getattr(self, key) < 1:
                raise ValueError(f"trainer.{key} is {getattr(self, key)}; it must be at least 1")
        for key in ("patience", "checkpoint_steps"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"trainer.{key} is {getattr(self, key)}; it must be at least 1, or null")


@dataclass(frozen=True)
class ExperimentConfig:
    """A whole experiment: what a preset holds, and what a run folder records."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    seed: int = 0
    """Seed of weights, order, dropout and generated data."""

    def __post_init__(self) -> None:
        _require_seed("seed", self.seed)

    @property
    def split_seed(self) -> int:
        """Of the random split of a file."""
        return self.seed if self.data.split_seed is None else self.data.split_seed

    @classmethod
    def from_preset(cls, name: str, overrides: Mapping[str, Any] | None = None) -> "ExperimentConfig":
        """A preset by name (or the path of a YAML file), with overrides by dotted key: {"optim.lr": 3e-4}."""
        return build(cls, [*read_preset(name), Layer("overrides", expand(overrides or {}))])

    def settings(self) -> dict[str, Any]:
        """All settings by dotted key, to be compared: the seed of a file's split is what it comes to."""
        own = {"data.split_seed": self.split_seed} if self.data.name == "custom" else {}
        return flat(plain(self)) | own

    def to_yaml(self) -> str:
        """All settings, resolved, as a preset file that `from_preset` reads back."""
        return yaml.safe_dump(plain(self), sort_keys=False, allow_unicode=True)


def _require_seed(name: str, seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise ValueError(f"{name} is {seed}; it must not be negative, and have 63 bits at most")
