"""That the kernels' tiles fit a GPU, which the interpreter does not care about."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sfiformer.attention import fused
from sfiformer.attention.kernels import SHARED_MEMORY

pytest.importorskip("triton.backends.nvidia", reason="the kernels need Triton, with a compiler for GPUs")


@pytest.mark.parametrize(("dtype", "width"), [("float32", 240), ("bfloat16", 240), ("float32", 128)])
def test_tiles_fit_the_chip(dtype, width, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("shared_memory.py"), dtype, str(width)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    kernels = [line.split() for line in run.stdout.splitlines()]
    names = {name for name, _, _ in kernels}
    assert {"stream_forward_kernel", "query_kernel", "key_kernel", "pivot_query_kernel"} <= names
    assert width < 240 or {"forward_kernel", "steep_forward_kernel", "chip_query_kernel"} <= names
    assert not [kernel for kernel in kernels if int(kernel[2]) > SHARED_MEMORY]


def test_attention_is_plain_where_they_do_not(monkeypatch):
    monkeypatch.setattr(fused, "usable", lambda x: True)
    monkeypatch.setattr(fused, "has_room", lambda device: False)
    q = torch.randn(5, 1, 8)
    options = {"alpha": 0.1, "potential": False, "scale": 1.0, "dropout_p": 0.0, "max_nodes": 5}
    assert fused.fused_attend(q, q, q, q, q, torch.tensor([0, 5]), torch.ones(1), **options) is None
