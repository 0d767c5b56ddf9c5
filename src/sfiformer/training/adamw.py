"""AdamW on a GPU that clips the gradient and leaves out steps that are not finite, in two kernels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sfiformer.attention.kernels import HAS_TRITON

CHUNK = 4096  # numbers of a tensor that a program takes at a time
MOST = 250  # gradients that a kernel is handed: its arguments have some 4,000 bytes
PARTS = 1024  # pieces of the sum of squares
WARPS_OF_SQUARES, WARPS_OF_UPDATE = 4, 8


def served(parameters: Sequence[Tensor]) -> bool:
    """Whether the kernels take these parameters: in float32, each in one piece, all on one GPU, with Triton."""
    device = parameters[0].device
    return HAS_TRITON and device.type == "cuda" and all(_fits(each, device) for each in parameters)


def _fits(tensor: Tensor, device: torch.device) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device == device


@dataclass(frozen=True)
class _Layout:
    """How some tensors are cut into chunks (see `kernels.adamw`), and room for what one kernel leaves to the other."""

    table: Tensor  # int64 [chunks, 8]
    steps: Tensor  # float32 [chunks]
    squares: Tensor  # float64 [pieces]
    # For MOST tensors each: first chunk, end, first piece and number of pieces.
    launches: list[tuple[int, int, int, int]]

    @classmethod
    def of(
        cls, params: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], steps: list[Tensor]
    ) -> "_Layout":
        device, pieces = params[0].device, 0
        rows: list[list[int]] = []
        launches: list[tuple[int, int, int, int]] = []
        for lowest in range(0, len(params), MOST):
            first = len(rows)
            for number in range(lowest, min(lowest + MOST, len(params))):
                tensors = (params[number], exp_avgs[number], exp_avg_sqs[number])
                size, addresses = params[number].numel(), [tensor.data_ptr() for tensor in tensors]
                # An empty tensor has a chunk too: its steps are counted.
                for start in range(0, max(size, 1), CHUNK):
                    places = [address + 4 * start for address in addresses]
                    part = [number - lowest, start, min(CHUNK, size - start)]
                    rows.append([*part, *places, steps[number].data_ptr(), 0])
            programs = min(len(rows) - first, PARTS)
            launches.append((first, len(rows), pieces, programs))
            pieces += programs
        table = torch.tensor(rows)
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        return cls(
            table,
            torch.empty(len(rows), dtype=torch.float32, device=device),
            torch.empty(pieces, dtype=torch.float64, device=device),
            launches,
        )


class ClippedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, with its state and its `state_dict`, whose `clipped_step` does all of

        s ← 1 if s = 1, or a loss or ‖g‖ is not finite;  where s = 0:
        g ← min(1, c / (‖g‖ + 10⁻⁶)) g
        m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   t ← t + 1
        θ ← θ − η w θ − η m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε)

    in two kernels that fill a GPU, however many tensors there are. (Its `step` is that of PyTorch.) Nothing waits for the
    device, and all can be captured in a CUDA graph once a plain step has made the state. The gradients stay as they are.

    Args:
        params: one group of float32 parameters on one device.
        lr: η, a tensor on that device.
        **settings: as AdamW has them; without `amsgrad`, `maximize` and `differentiable`.
    """

    def __init__(self, params: Iterable[Parameter], lr: Tensor, **settings: Any) -> None:
        super().__init__(params, lr, **{**settings, "fused": True, "capturable": True})
        # By the addresses of all tensors. None is ever dropped: captured steps may hold it.
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._group()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_layouts", {})  # a copy has none: its tensors lie elsewhere

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the state of an AdamW of any kind, on any device."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            device = group["params"][0].device
            lr = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)
            group.update(lr=lr, fused=True, capturable=True)
        for parameter, state in self.state.items():
            state["step"] = state["step"].to(parameter.device, torch.float32)
        self._group()

    @torch.no_grad()
    def clipped_step(self, losses: Sequence[Tensor], max_norm: float, spoilt: Tensor) -> Tensor:
        """A step with the gradients there are, clipped to `max_norm`; the losses, and the norm of the gradient.

        Args:
            losses: float32 [], each on the device.
            max_norm: c.
            spoilt: s, float32 [], on the device; changed in place.
        """
        from sfiformer.training.kernels.adamw import squares_kernel, update_kernel

        group = self._group()
        params: list[Tensor] = []
        grads: list[Tensor] = []
        moments: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])  # first, second, step counts
        self._init_group(group, params, grads, *moments[:2], [], moments[2])
        if not params:
            raise RuntimeError("no parameter has a gradient: there is no step to do")
        grads = [grad.contiguous() for grad in grads]
        layout = self._layout(params, *moments)
        # An empty gradient has no address; none is read from it.
        addresses = tuple(grad.data_ptr() or spoilt.data_ptr() for grad in grads)
        values = torch.stack([*losses, losses[0]])  # the last is the place of the norm
        beta1, beta2 = group["betas"]
        with torch.cuda.device_of(params[0]):  # kernels are launched on the current device
            for number, (first, end, piece, pieces) in enumerate(layout.launches):
                squares_kernel[(pieces,)](
                    layout.table, addresses[number * MOST : (number + 1) * MOST], layout.steps, layout.squares,
                    first, end, piece, CHUNK=CHUNK, num_warps=WARPS_OF_SQUARES,
                )  # fmt: skip
            update_kernel[(len(layout.table),)](
                layout.table, layout.steps, layout.squares, values, spoilt, group["lr"],
                float(max_norm), float(group["weight_decay"]), float(group["eps"]), len(losses), len(layout.squares),
                BETA1=beta1, BETA2=beta2, LOSSES=1 << (len(losses) - 1).bit_length(), PARTS=PARTS,
                CHUNK=CHUNK, num_warps=WARPS_OF_UPDATE,
            )  # fmt: skip
        torch.autograd.graph.increment_version(params)  # of what was changed behind autograd's back
        return values

    def _layout(self, params: list[Tensor], *state: list[Tensor]) -> _Layout:
        """That of the parameters that have a gradient."""
        key = tuple(tensor.data_ptr() for tensors in (params, *state) for tensor in tensors)
        if key not in self._layouts:
            if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "ClippedAdamW must do a plain step with these gradients before a captured one"
                )
            device = params[0].device
            for tensor in (tensor for tensors in (params, *state) for tensor in tensors):
                if not _fits(tensor, device):
                    raise ValueError(
                        f"ClippedAdamW takes float32 parameters, each in one piece, all on {device}; not one of "
                        f"{tensor.dtype} with strides {tensor.stride()} on {tensor.device}"
                    )
            self._layouts[key] = _Layout.of(params, *state)
        return self._layouts[key]

    def _group(self) -> dict[str, Any]:
        """The one group of parameters, if it is what the kernels know."""
        if len(self.param_groups) != 1:
            raise ValueError(f"ClippedAdamW takes one group of parameters, not {len(self.param_groups)}")
        group = self.param_groups[0]
        for name in ("amsgrad", "maximize", "differentiable"):
            if group[name]:
                raise ValueError(f"ClippedAdamW knows no {name}")
        lr, device = group["lr"], group["params"][0].device
        if not isinstance(lr, Tensor) or lr.device != device or lr.dtype != torch.float32:
            raise ValueError(f"ClippedAdamW's learning rate must be a float32 tensor on {device}, not {lr!r}")
        return group
