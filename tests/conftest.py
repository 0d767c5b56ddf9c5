"""Settings of every test."""

import os
import sys
from pathlib import Path

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: kernels then run without a GPU

sys.path.insert(0, str(Path(__file__).parent))  # for `graphs`, `oracles`, `packing` and the like

settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


def pytest_terminal_summary(terminalreporter):
    """Say what tests measured without judging it: `record_property("measured", …)`."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(f"measured: {value}")
