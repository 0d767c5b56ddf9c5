"""The nine benchmark datasets of the paper: where each comes from, what its archive holds, and what it asks.

Five are of the Long Range Graph Benchmark (LRGB), four of "Benchmarking Graph Neural Networks". Archives and
raw files are those that PyTorch Geometric's `LRGBDataset` and `GNNBenchmarkDataset` use, so that both can
share one root.
"""

from dataclasses import dataclass
from difflib import get_close_matches

from sfiformer.data.task import Task

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Dataset:
    """One official dataset."""

    name: str
    folder: str
    """The dataset's folder under the root; its raw files lie in `folder/raw`."""
    archive: str
    """File name of the official archive."""
    url: str
    """Where the archive was published."""
    inner: str
    """The folder inside the archive that holds the raw files, "" for none."""
    files: tuple[str, ...]
    """The raw files: one for each split, or one for all three."""
    graphs: tuple[int, int, int]
    """Graphs in train, val and test."""
    mean_nodes: float
    mean_edges: float
    """Published means over all graphs; edges are directed, an undirected one counts twice."""
    node_width: int
    edge_width: int
    """Columns of x and of edge_attr; 0 where edges carry nothing."""
    task: Task
    licence: str
    molecular: bool = False
    """Whether x and edge_attr are OGB's integer atom and bond features; elsewhere they are real numbers."""
    standardise: bool = False
    """Whether node and edge features are to be standardised with the training split's mean and deviation."""


def find(name: str) -> Dataset:
    """The dataset of this name, in any case."""
    key = name.lower()
    if key not in DATASETS:
        near = get_close_matches(key, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(DATASETS)}"
        raise ValueError(f"no official dataset is named {name!r}; {hint}")
    return DATASETS[key]


_VOC = (
    "background,aeroplane,bicycle,bird,boat,bottle,bus,car,cat,chair,cow,dining table,dog,horse,"
    "motorbike,person,potted plant,sheep,sofa,train,tv monitor"
)
_COCO = (
    "background,person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,"
    "stop sign,parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,backpack,"
    "umbrella,handbag,tie,suitcase,frisbee,skis,snowboard,sports ball,kite,baseball bat,baseball glove,"
    "skateboard,surfboard,tennis racket,bottle,wine glass,cup,fork,knife,spoon,bowl,banana,apple,"
    "sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,potted plant,bed,dining table,"
    "toilet,tv,laptop,mouse,remote,keyboard,cell phone,microwave,oven,toaster,sink,refrigerator,book,"
    "clock,vase,scissors,teddy bear,hair drier,toothbrush"
)
_FUNCTIONS = (
    "antifungal,cell-cell communication,anticancer,drug delivery vehicle,antimicrobial,antiviral,"
    "antihypertensive,antibacterial,antiparasitic,toxic"
)
_STRUCTURE = (
    "inertia mass a,inertia mass b,inertia mass c,inertia valence a,inertia valence b,inertia valence c,"
    "length a,length b,length c,spherocity,plane best fit"
)
_CIFAR10 = "airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck"


def _lrgb(name: str, share: str, suffix: str, **facts) -> Dataset:
    archive = name.replace("-", "") + ".zip"
    return Dataset(
        name=name,
        folder=name,
        archive=archive,
        url=f"https://www.dropbox.com/s/{share}/{archive}?dl=1",
        files=tuple(f"{split}.{suffix}" for split in SPLITS),
        **facts,
    )


def _benchmark(name: str, **facts) -> Dataset:
    stem = f"{name.upper()}_v2"
    return Dataset(
        name=name,
        folder=name.upper(),
        archive=f"{stem}.zip",
        url=f"https://data.pyg.org/datasets/benchmarking-gnns/{stem}.zip",
        inner="",
        files=(f"{stem}.pt",),
        **facts,
    )


_ALL = (
    _lrgb(
        "pascalvoc-sp",
        "8x722ai272wqwl4",
        "pickle",
        inner="voc_superpixels_edge_wt_region_boundary",
        graphs=(8_498, 1_428, 1_429),
        mean_nodes=479.40,
        mean_edges=2_710.48,
        node_width=14,
        edge_width=2,
        task=Task("node", "classification", 21, class_names=tuple(_VOC.split(","))),
        licence="Pascal VOC 2011 terms (research use; the images are subject to Flickr's terms)",
        standardise=True,
    ),
    _lrgb(
        "coco-sp",
        "r6ihg1f4pmyjjy0",
        "pickle",
        inner="coco_superpixels_edge_wt_region_boundary",
        graphs=(113_286, 5_000, 5_000),
        mean_nodes=476.88,
        mean_edges=2_693.67,
        node_width=14,
        edge_width=2,
        task=Task("node", "classification", 81, class_names=tuple(_COCO.split(","))),
        licence="CC BY 4.0",
        standardise=True,
    ),
    _lrgb(
        "peptides-func",
        "ycsq37q8sxs1ou8",
        "pt",
        inner="peptidesfunc",
        graphs=(10_873, 2_331, 2_331),
        mean_nodes=150.94,
        mean_edges=307.30,
        node_width=9,
        edge_width=3,
        task=Task("graph", "multilabel", 10, target_names=tuple(_FUNCTIONS.split(","))),
        licence="CC BY-NC 4.0",
        molecular=True,
    ),
    _lrgb(
        "peptides-struct",
        "zgv4z8fcpmknhs8",
        "pt",
        inner="peptidesstruct",
        graphs=(10_873, 2_331, 2_331),
        mean_nodes=150.94,
        mean_edges=307.30,
        node_width=9,
        edge_width=3,
        # The archive's targets are standardised already, and scores are given in those units.
        task=Task("graph", "regression", 11, target_names=tuple(_STRUCTURE.split(","))),
        licence="CC BY-NC 4.0",
        molecular=True,
    ),
    _lrgb(
        "pcqm-contact",
        "qdag867u6h6i60y",
        "pt",
        inner="pcqmcontact",
        # 529,434 molecules, of which the published recipe takes int(0.9 N) for training and halves the rest.
        graphs=(476_490, 26_472, 26_472),
        mean_nodes=30.14,
        mean_edges=61.09,
        node_width=9,
        edge_width=3,
        task=Task("link", "ranking", 1),
        licence="CC BY 4.0",
        molecular=True,
    ),
    _benchmark(
        "mnist",
        graphs=(55_000, 5_000, 10_000),
        mean_nodes=70.57,
        mean_edges=564.53,
        node_width=3,
        edge_width=1,
        task=Task("graph", "classification", 10, class_names=tuple("0123456789")),
        licence="CC BY-SA 3.0",
    ),
    _benchmark(
        "cifar10",
        graphs=(45_000, 5_000, 10_000),
        mean_nodes=117.6,
        mean_edges=941.2,
        node_width=5,
        edge_width=1,
        task=Task("graph", "classification", 10, class_names=tuple(_CIFAR10.split(","))),
        licence="MIT",
    ),
    _benchmark(
        "pattern",
        graphs=(10_000, 2_000, 2_000),
        mean_nodes=118.9,
        mean_edges=6_098.9,
        node_width=3,
        edge_width=0,
        task=Task("node", "binary", 1, class_names=("background", "pattern")),
        licence="MIT",
    ),
    _benchmark(
        "cluster",
        graphs=(10_000, 1_000, 1_000),
        mean_nodes=117.2,
        mean_edges=4_303.9,
        node_width=7,
        edge_width=0,
        task=Task("node", "classification", 6),
        licence="MIT",
    ),
)
DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in _ALL}
