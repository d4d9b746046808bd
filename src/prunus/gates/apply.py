"""Putting gates to work: drawing a sample, laying it out along axes, multiplying it into weights or into inputs.

Each is one operation of autograd with its derivative written out, because a training step on a CPU is otherwise spent
in recording operations on tensors of a thousand numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from prunus.errors import ModelError
from prunus.gates.hard_concrete import HardConcrete

LARGE = 100_000  # numbers of a weight from which on one pass over it, without room for a product, is quicker


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
        """Draw."""
        z, s = gates.draw(log_alpha, noise)
        ctx.save_for_backward(log_alpha, noise, z, s)
        ctx.gates = gates
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        """The gradient of log alpha, summed over examples."""
        log_alpha, noise, z, s = ctx.saved_tensors
        if torch.is_grad_enabled():
            (gradient,) = _again(lambda x: ctx.gates.drawn(x, noise), [log_alpha], [grad])
            return gradient, None, None
        result = ctx.gates.slope(grad, z, s)
        return (result.sum(0) if result.dim() > 1 else result), None, None


@dataclass(frozen=True)
class Sites:
    """Where gates act: for every weight that reads gated units, the gates at the positions of its reading dimension.

    `index` numbers the gates that multiply at all weights' positions, row by row one factor; None where gate k acts at
    position k alone. `lengths` are the positions of each weight, `shapes` what makes them broadcast over it.
    """

    index: Tensor | None
    lengths: list[int]
    shapes: list[tuple[int, ...]]

    def multiply(self, z: Tensor, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The weights with gates multiplied in, and what the gradients need."""
        extended = z if self.index is None else F.pad(z, (0, 1), value=1.0)
        laid = extended if self.index is None else lay(extended, self.index)
        parts = [part.view(shape) for part, shape in zip(laid.split(self.lengths), self.shapes, strict=True)]
        if any(weight.dtype != laid.dtype for weight in weights):
            parts = [part.to(weight.dtype) for part, weight in zip(parts, weights, strict=True)]
        return tuple(map(torch.mul, weights, parts)), (extended, *parts, *weights)

    def gradients(self, saved: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """From the gradients of the products those of the gates, gathered from their positions, and of the weights."""
        extended, parts, weights = saved[0], saved[1 : len(grads) + 1], saved[len(grads) + 1 :]
        for_gates, for_weights = [], []
        for grad, part, weight in zip(grads, parts, weights, strict=True):
            for_weight, for_gate = _product_backward(grad, part, weight)
            for_weights.append(for_weight)
            for_gates.append(for_gate.flatten())
        along = torch.cat(for_gates).to(extended.dtype)
        if self.index is not None:
            total = torch.zeros_like(extended)
            for number, row in enumerate(self.index):
                total = total.index_add(0, row, along * lay(extended, self.index, leave_out=number))
            along = total[:-1]
        return along, for_weights


def _product_backward(grad: Tensor, part: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradient of weight * part, those of both: grad * part, and grad * weight summed to part's shape.

    Along dimension 1, where layers read, the product is a batch norm in evaluation mode with mean 0 and variance 1. Its
    backward is one pass that needs no room for grad * weight: with large weights a fraction of the time on a CPU.
    """
    size = part.numel()
    one_pass = weight.numel() > LARGE and weight.device.type == "cpu" and not weight.is_complex()
    if one_pass and part.shape[1] == size == weight.shape[1]:
        for_weight, for_part, _ = torch.ops.aten.native_batch_norm_backward(
            grad, weight, part.flatten(), part.new_zeros(size), part.new_ones(size), None, None, False, 0.0,
            [True, True, False],
        )  # fmt: skip
        return for_weight, for_part
    product = grad * weight.conj()
    product = product.real if product.is_complex() else product  # a gate is real
    rest = [d for d in range(part.dim()) if part.shape[d] == 1 and weight.shape[d] != 1]
    return grad * part, product.sum(rest) if rest else product


def _again(products: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """The same gradients by autograd, recorded: for whoever differentiates them again (create_graph=True)."""
    wanted = [k for k, tensor in enumerate(inputs) if tensor.requires_grad]
    found = torch.autograd.grad(
        products(*inputs), [inputs[k] for k in wanted], grads, create_graph=True, allow_unused=True
    )
    result: list[Tensor | None] = [None] * len(inputs)
    for k, gradient in zip(wanted, found, strict=True):
        result[k] = gradient
    return result


class Multiply(torch.autograd.Function):
    """Given gates, laid out and multiplied into every weight that reads gated units, as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, sites: Sites, *weights: Tensor) -> tuple[Tensor, ...]:
        """Multiply."""
        products, saved = sites.multiply(z, weights)
        ctx.sites = sites
        ctx.save_for_backward(z, *saved)
        return products

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of gates and weights."""
        z, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = [z, *saved[len(grads) + 1 :]]
            first, *rest = _again(lambda z, *weights: ctx.sites.multiply(z, weights)[0], inputs, grads)
            return first, None, *rest
        along, for_weights = ctx.sites.gradients(saved, grads)
        return along, None, *for_weights


class DrawAndMultiply(torch.autograd.Function):
    """One hard concrete sample, multiplied in: a training step's whole way from log alpha to the weights."""

    @staticmethod
    def forward(
        ctx: Any, log_alpha: Tensor, noise: Tensor, gates: HardConcrete, sites: Sites, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """Draw, then multiply."""
        z, s = gates.draw(log_alpha, noise)
        products, saved = sites.multiply(z, weights)
        ctx.gates, ctx.sites = gates, sites
        ctx.save_for_backward(log_alpha, noise, s, *saved)
        return products

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of log alpha and weights."""
        log_alpha, noise, s, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():

            def products(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
                return ctx.sites.multiply(ctx.gates.drawn(x, noise), weights)[0]

            first, *rest = _again(products, [log_alpha, *saved[len(grads) + 1 :]], grads)
            return first, None, None, None, *rest
        along, for_weights = ctx.sites.gradients(saved, grads)
        z = saved[0] if ctx.sites.index is None else saved[0][:-1]
        return ctx.gates.slope(along, z, s), None, None, None, *for_weights


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


@contextmanager
def never_recomputed() -> Iterator[None]:
    """Refuse activation checkpointing inside: its second forward pass runs in the backward pass, without the gates.

    `torch.utils.checkpoint.checkpoint` reaches its two implementations through names of its module.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield
        return
    own = {name: getattr(checkpoint, name) for name in _CHECKPOINTS}
    for name, refusing in _CHECKPOINTS.items():
        setattr(checkpoint, name, refusing)
    try:
        yield
    finally:
        for name, one in own.items():
            setattr(checkpoint, name, one)


def _refuse_checkpoints(*_: Any, **__: Any) -> Any:
    raise ModelError(
        "The model recomputes activations in its backward pass (torch.utils.checkpoint), where the gates would not "
        "act: switch that off while it is gated."
    )


class _RefusesCheckpoints:
    apply = staticmethod(_refuse_checkpoints)


_CHECKPOINTS = {
    "_checkpoint_without_reentrant_generator": _refuse_checkpoints,
    "CheckpointFunction": _RefusesCheckpoints,
}
