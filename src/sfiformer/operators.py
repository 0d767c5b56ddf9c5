"""Custom operators that PyTorch's function transforms can follow, or that say that they cannot.

Those of `torch.library` alone would take a tangent of forward mode for 0 without a word, and `torch.func.grad` stops at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transformed() -> bool:
    """Whether a transform of `torch.func` is at work, or a level of forward mode is open."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def on_its_device(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of an operator, with the device of its first tensor as the current one: kernels are launched there."""

    @wraps(body)
    def guarded(*inputs: Any) -> Any:
        with torch.cuda.device_of(next(_tensors(inputs))):
            return body(*inputs)

    return guarded


def _tensors(inputs: Iterable[Any]) -> Iterator[Tensor]:
    """Those among the inputs of an operator, alone and in lists."""
    for x in inputs:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Decorates the body of an operator that changes none of its arguments."""
    return lambda body: Operator(name, body)


class Operator:
    """An operator of `torch.library`, called and given its derivative like one. Under transforms it is a function around it.

    Operators without a derivative are those that compute one: it exists once. Lists of tensors are for operators that are not
    called under transforms.
    """

    def __init__(self, name: str, body: Callable[..., Any]) -> None:
        self.name = name
        self.plain = torch.library.custom_op(name, on_its_device(body), mutates_args=())
        self.register_fake = self.plain.register_fake
        self.register_autograd(self._refuse_second, setup_context=_keep_nothing)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        self.plain.register_autograd(backward, setup_context=setup_context)
        methods = {
            "forward": self.plain.__call__,
            "setup_context": setup_context,
            "backward": backward,
            "jvp": self._refuse_tangents,
        }
        body = {name: staticmethod(method) for name, method in methods.items()}
        self.function = type(self.name, (torch.autograd.Function,), {"generate_vmap_rule": True, **body})

    def __call__(self, *inputs: Any) -> Any:
        return self.function.apply(*inputs) if transformed() else self.plain(*inputs)  # type: ignore[attr-defined]

    def _refuse_tangents(self, *_: Any) -> NoReturn:
        refuse_tangents(self.name)

    def _refuse_second(self, *_: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.name} has no derivative: what it belongs to can be differentiated once. Of sfi_attention there are "
            "second derivatives with return_flows=True"
        )


def refuse_tangents(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad): use reverse "
        "mode (torch.autograd.grad, torch.func.grad, vjp, jacrev); for a Hessian jacrev twice, with return_flows=True"
    )


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Of an operator whose derivative nobody has."""
