"""Run folders of a suite, as training would leave them."""

import json

from sfiformer.config import ExperimentConfig
from sfiformer.suites.folder import SuiteFolder
from sfiformer.suites.plan import Run


def pretend(
    folder: SuiteFolder,
    run: Run,
    test: float | None,
    config: ExperimentConfig | None = None,
    metric: str = "mean_recall",
) -> None:
    """A run folder as training would leave it, with these metrics."""
    path = folder.run(run.name).path
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text((config or run.config).to_yaml())
    epochs = [{"epoch": i, "train": 0.1 * i, "val": 0.1, "test": 0.08 * i, "loss": 1.0} for i in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))
    result = {
        "metric": metric, "higher_is_better": True, "best_epoch": 3, "train": 0.3, "val": 0.1, "test": test,
        "gap": 0.06, "zero_share": 0.25, "epochs": 3, "seconds": 12.0, "parameters": 1234,
    }  # fmt: skip
    (path / "result.json").write_text(json.dumps(result))
