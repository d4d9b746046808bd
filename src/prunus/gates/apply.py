"""Putting gates to work: drawing a sample, laying it out along axes, multiplying it into weights or into inputs.

Each is one operation of autograd with its derivative written out, because a training step on a CPU is otherwise spent
in recording operations on tensors of a thousand numbers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from prunus.errors import ModelError
from prunus.gates.hard_concrete import HardConcrete


def lay(extended: Tensor, index: Tensor, leave_out: int = -1) -> Tensor:
    """Lay gates out along the sites: at every position the product of those that act there."""
    result: Tensor | None = None
    for number, row in enumerate(index):
        if number != leave_out:
            one = extended.index_select(-1, row)
            result = one if result is None else result * one
    return extended.new_ones(()) if result is None else result


class Draw(torch.autograd.Function):
    """One hard concrete sample as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, log_alpha: Tensor, noise: Tensor, gates: HardConcrete) -> Tensor:
        """Draw: keep s and the stretched value for the slope."""
        z, drawn = gates.draw(log_alpha, noise)
        ctx.save_for_backward(*drawn)
        ctx.gates = gates
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of log alpha, summed over examples."""
        s, stretched = ctx.saved_tensors
        result = ctx.gates.slope(grad, (s, stretched))
        return (result.sum(0) if result.dim() > 1 else result), None, None


class Multiply(torch.autograd.Function):
    """Gates laid out and multiplied into every weight that reads gated units, as one operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, index: Tensor | None, lengths: list[int], shapes: list[tuple[int, ...]], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """Multiply, and keep what the gradients need."""
        extended = z if index is None else F.pad(z, (0, 1), value=1.0)
        laid = extended if index is None else lay(extended, index)
        parts = [
            part.view(shape).to(weight.dtype)
            for part, shape, weight in zip(laid.split(lengths), shapes, weights, strict=True)
        ]
        ctx.index = index
        ctx.save_for_backward(extended, *parts, *weights)
        return tuple(weight * part for weight, part in zip(weights, parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the gates, gathered back from their positions, and of the weights."""
        extended, *saved = ctx.saved_tensors
        parts, weights = saved[: len(grads)], saved[len(grads) :]
        for_gates, for_weights = [], []
        for grad, part, weight in zip(grads, parts, weights, strict=True):
            for_weights.append(grad * part)
            rest = [d for d in range(part.dim()) if part.shape[d] == 1 and weight.shape[d] != 1]
            product = grad * weight
            for_gates.append((product.sum(rest) if rest else product).flatten().to(extended.dtype))
        along = torch.cat(for_gates)
        if ctx.index is not None:
            total = torch.zeros_like(extended)
            for number, row in enumerate(ctx.index):
                total = total.index_add(0, row, along * lay(extended, ctx.index, leave_out=number))
            along = total[:-1]
        return along, None, None, None, *for_weights


_CONVOLUTIONS = {
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d
}  # fmt: skip


class GateInputs(TorchFunctionMode):
    """Multiply gates into the inputs of the layers that read gated units: one sample an example needs activations."""

    def __init__(self, table: Mapping[int, tuple[Tensor, str]], batch: int) -> None:
        super().__init__()
        self.table = table
        self.batch = batch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or func in _CONVOLUTIONS:
            x = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            found = self.table.get(id(weight))
            if found is not None:
                gate, name = found
                if x.shape[0] != self.batch:
                    raise ModelError(
                        f"per_example needs the batch in the first dimension of what {name} reads: there it has "
                        f"{x.shape[0]} entries for {self.batch} examples."
                    )
                if func is F.linear:
                    gate = gate.view(self.batch, *[1] * (x.dim() - 2), -1)
                else:
                    gate = gate.repeat(1, x.shape[1] // gate.shape[1])
                    gate = gate.view(self.batch, -1, *[1] * (x.dim() - 2))
                x = x * gate.to(x.dtype)
                args = (x, *args[1:]) if args else args
                if not args:
                    kwargs["input"] = x
        return func(*args, **kwargs)
