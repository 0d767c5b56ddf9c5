"""Attention's kernels compiled twice for an H200, without one: the names of what each round compiles, a line for each round.

Whatever is asked of the GPU itself is an error.
"""

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sfiformer.attention.kernels import launch
from sfiformer.training.compiling import compiled_only

SIZES = [90, 110]


class H200:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def attend():
    q, k, v, q_friction, k_friction = torch.zeros(5, sum(SIZES), 1, 16).unbind()
    ptr, lam = torch.tensor([0, *SIZES]).cumsum(0), torch.ones(len(SIZES))
    tensors, seed = (q, k, v, q_friction, k_friction, ptr, lam), torch.zeros((), dtype=torch.int64)
    _, stats, means = launch.fused_attention(*tensors, seed, 0.1, False, 1.0, 0.1, max(SIZES))
    launch.fused_attention_backward(v, *tensors, seed, stats, means, False, 1.0, 0.1, max(SIZES))


def main() -> None:
    driver.set_active(H200())
    compiled: list[str] = []
    knobs.compilation.listener = lambda *, src, **event: compiled.append(src.name)
    launched = JITFunction.run
    for _ in range(2):
        compiled.clear()
        with compiled_only():
            attend()
        print(*compiled)
    try:
        with compiled_only():
            raise KeyError
    except KeyError:
        pass
    assert JITFunction.run is launched


if __name__ == "__main__":
    main()
