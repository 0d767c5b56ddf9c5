"""python shared_memory.py DTYPE WIDTH: the shared memory of the kernels that attention launches with heads of that width.

They are compiled for an H200, without one, as far as it takes to know. Of those with rows on chip, whose tiles hardly depend on
the width, only the largest are, with the widest heads. One line each: name, keys of a tile, bytes.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sfiformer.attention.kernels import launch

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
SIZES = [900, 1100]  # one graph on chip, one to stream


def compiled(kernel, args, kwargs):
    """The kernel for these arguments, up to its intermediate code."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}

    def kind(name):
        value = values[name]
        if name in fixed:
            return "constexpr"
        return (
            f"*{TYPES[value.dtype]}"
            if torch.is_tensor(value)
            else "fp32"
            if isinstance(value, float)
            else "i32"
        )

    signature = {name: kind(name) for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in signature if signature[name][0] == "*"}
    source = ASTSource(kernel, signature, {places[name]: values[name] for name in fixed}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    launched = []
    JITFunction.run = lambda kernel, *args, grid, warmup, **kwargs: launched.append((kernel, args, kwargs))
    CUDABackend.make_ptx = lambda self, source, metadata, *_: metadata.setdefault("name", "kernel")
    CUDABackend.make_cubin = lambda *_: b""
    dtype, width = getattr(torch, sys.argv[1]), int(sys.argv[2])
    q, k, v, q_friction, k_friction = torch.zeros(5, sum(SIZES), 1, width, dtype=dtype).unbind()
    ptr, lam = torch.tensor([0, *SIZES]).cumsum(0), torch.ones(len(SIZES))
    tensors, seed = (q, k, v, q_friction, k_friction, ptr, lam), torch.zeros((), dtype=torch.int64)
    _, stats, means = launch.fused_attention(*tensors, seed, 0.1, False, 1.0, 0.1, max(SIZES))
    launch.fused_attention_backward(v, *tensors, seed, stats, means, False, 1.0, 0.1, max(SIZES))
    for kernel, args, kwargs in launched:
        keys = kwargs.get("KEYS", 0)
        if "MORE_THAN" not in kwargs or (keys > 256 and width > 128):
            print(kernel.__name__, keys, compiled(kernel, args, kwargs).metadata.shared, flush=True)


if __name__ == "__main__":
    main()
