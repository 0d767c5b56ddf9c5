"""One step of training: the loss of the global batch, its gradient, AdamW."""

import math
from collections.abc import Sequence

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from sfiformer import ranks
from sfiformer.data.batch import GraphBatch
from sfiformer.data.task import Task
from sfiformer.nn.model import SFiFormer
from sfiformer.training.adamw import ClippedAdamW
from sfiformer.training.average import Average
from sfiformer.training.examples import target_of
from sfiformer.training.losses import Loss


class NonFinite(ArithmeticError):
    """A step's loss or gradient is not finite; the message says where. No weight was changed by the step."""


class Step:
    """Does steps with a model and its optimiser.

    With several ranks, each has its share of the batch. The loss is that of the global batch,
    Σ_r total_r / Σ_r weight_r with class weights from Σ_r counts_r, and so are its gradient and its norm.

    On a GPU nothing waits for the device: a step that is not finite changes no weight, nor does any step after
    it, and the caller finds out whenever it looks at what the step gave (then `explain` says more).
    """

    def __init__(
        self,
        fabric: Fabric,
        model: SFiFormer,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        task: Task,
        clip_norm: float,
        average: Average | None = None,
    ) -> None:
        self.fabric, self.model, self.optimizer = fabric, model, optimizer
        self.loss, self.task, self.clip_norm, self.average = loss, task, clip_norm, average
        self.spoilt = None
        if fabric.device.type == "cuda":
            self.spoilt = torch.zeros((), device=fabric.device)  # 1 from the first step on that is not finite
            optimizer.found_inf = self.spoilt  # type: ignore[attr-defined]  # AdamW's own way to skip a step

    def __call__(self, batches: Sequence[GraphBatch]) -> Tensor:
        """Step along the mean gradient of some batches; their losses, and the norm of the gradient.

        Raises:
            NonFinite: on a CPU, on all ranks alike.
        """
        outputs, losses = self._gradient(batches)
        if isinstance(self.optimizer, ClippedAdamW) and self.spoilt is not None:
            values = self.optimizer.clipped_step(losses, self.clip_norm, self.spoilt)
        else:
            values = self._plainly(outputs, losses)
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        return values

    def explain(self, batches: Sequence[GraphBatch]) -> NonFinite:
        """What was not finite in a step on these batches that has left the weights as they were."""
        outputs, losses = self._gradient(batches)
        return NonFinite(self._where(outputs, [*torch.stack(losses).tolist(), float(self._norm())]))

    def _plainly(self, outputs: list[Tensor], losses: list[Tensor]) -> Tensor:
        """Clip the gradient and step along it; the losses, and the norm of the gradient."""
        values = torch.stack([*losses, self._norm()])
        if self.spoilt is not None:
            torch.maximum(self.spoilt, (~values.isfinite()).any(), out=self.spoilt)
        elif not bool(values.isfinite().all()):
            raise NonFinite(self._where(outputs, values.tolist()))
        clip_grads_with_norm_(self.model.parameters(), self.clip_norm, values[-1])
        self.optimizer.step()
        return values

    def _norm(self) -> Tensor:
        """Of the gradient. In float64: at ties of friction a derivative may be finite, and its square beyond float32."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
        return torch.linalg.vector_norm(torch.stack(norms)).float()

    def _gradient(self, batches: Sequence[GraphBatch]) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and losses of the batches, whose gradient is then that of the parameters."""
        outputs, losses = [], []
        for batch in batches:
            output, loss = self._backward(batch, 1 / len(batches))
            outputs.append(output)
            losses.append(loss)
        ranks.sum_gradients(self.model.parameters())
        return outputs, losses

    def _backward(self, batch: GraphBatch, factor: float) -> tuple[Tensor, Tensor]:
        """Add a batch's gradient; the outputs, and the loss of the global batch."""
        target = target_of(batch, self.task)
        counts = self.loss.counts(target)
        if counts is not None:
            counts = ranks.summed(counts)
        try:
            with self.fabric.autocast():
                outputs = self.model(batch)
        except ValueError as error:
            if "finite" not in str(error):
                raise
            raise NonFinite(
                f"inside the model: {error}"
            ) from error  # attention looks at its inputs, on a CPU
        total, weight = self.loss.terms(outputs.float(), target, counts)
        sums = ranks.summed(torch.stack([total.detach(), weight]))
        weight = sums[1].clamp(min=torch.finfo(sums.dtype).tiny)
        self.fabric.backward(total / weight * factor)
        return outputs.detach(), sums[0] / weight

    def _where(self, outputs: Sequence[Tensor], values: list[float]) -> str:
        """What is not finite: parameters, outputs, losses, gradients, in the order in which they come about."""
        found = [name for name, p in self.model.named_parameters() if not p.isfinite().all()]
        parts = [f"parameters ({_listed(found)})"] if found else []
        wrong = sum(int((~output.isfinite()).sum()) for output in outputs)
        if wrong:
            parts.append(f"{wrong} of the model's {sum(output.numel() for output in outputs)} outputs")
        parts += [f"the loss ({value})" for value in values[:-1] if not math.isfinite(value)]
        found = [
            name
            for name, p in self.model.named_parameters()
            if p.grad is not None and not p.grad.isfinite().all()
        ]
        parts.append(f"the gradients of {_listed(found)}" if found else "the norm of the gradient")
        return ", ".join(parts)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
