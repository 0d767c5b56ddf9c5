"""That the kernels' tiles fit a GPU, which the interpreter does not care about."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton.backends.nvidia", reason="the kernels need Triton, with its compiler for NVIDIA's GPUs"
)

MOST = 232_448  # bytes of shared memory that a block may have on an H200


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tile_fits_the_chip(dtype, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("shared_memory.py")
    run = subprocess.run(
        [sys.executable, script, dtype],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    kernels = [line.split() for line in run.stdout.splitlines()]
    assert {"forward_kernel", "chip_query_kernel", "key_kernel", "pivot_query_kernel"} <= {
        name for name, _, _ in kernels
    }
    assert not [kernel for kernel in kernels if int(kernel[2]) > MOST]
