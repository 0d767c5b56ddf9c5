"""What a run was trained with: versions of packages, the platform, the revision of the sources."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import sfiformer


def surroundings() -> dict[str, Any]:
    """Versions, platform and git revision, for about.json."""
    packages = ("torch", "lightning", "torch-geometric", "torchmetrics", "numpy", "scipy", "numba", "triton")
    versions = {"sfiformer": sfiformer.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "platform": platform.platform(), "git": _git_revision()}


def _git_revision() -> str | None:
    """The revision of the sources, with a + where they were changed since; None outside a checkout of them."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Installed into somebody else's checkout, the sources are not tracked there.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
