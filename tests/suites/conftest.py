"""A suite that is planned and reported in no time: nothing of it is trained."""

from pathlib import Path

import pytest

from sfiformer.suites.folder import SuiteFolder
from sfiformer.suites.plan import Run, plan
from sfiformer.suites.suite import Suite, read_suite

TEXT = """
title: A small suite
settings: {data.size: small, trainer.epochs: 3}
datasets: {cluster: {label: CLUSTER}, pattern: {}}
models:
  gps: {label: GPS+Transformer, settings: {model.attention: softmax}}
  dfi: {settings: {model.attention: dfi}}
  sfi: {label: SFi-Former}
  plus: {label: SFi-Former+, init_from: dfi}
  lam-2: {label: "SFi-Former, λ* = 2", settings: {model.lam: 2}}
runs:
  - {name: models, datasets: [cluster, pattern], models: [gps, sfi, plus], seeds: [0, 1],
     published: [gnn-benchmark], gap: [gps, sfi]}
  - {name: lam, datasets: [cluster], models: [sfi, lam-2], seeds: [0], curves: {model.lam: [sfi, lam-2]}}
"""


@pytest.fixture
def suite_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    path = tmp_path_factory.mktemp("suite") / "small.yaml"
    path.write_text(TEXT)
    return read_suite(str(path))


@pytest.fixture(scope="session")
def runs(suite: Suite) -> dict[str, Run]:
    return plan(suite)


@pytest.fixture
def folder(tmp_path: Path) -> SuiteFolder:
    return SuiteFolder(tmp_path / "out")
