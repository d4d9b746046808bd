"""Running a model to compare it: its inputs, its outputs, and nothing about it changed afterwards."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from prunus.errors import ModelError, PrunusError, said
from prunus.measure import evaluating

SEED = 5  # of what a model itself draws: the same in every run that is compared


@dataclass(frozen=True)
class Inputs:
    """One call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, example: Any) -> "Inputs":
        """Read what a user gives as example inputs: a tensor, a tuple of arguments, or a dict of named ones."""
        if isinstance(example, Inputs):
            return example
        if isinstance(example, Mapping):
            return cls((), dict(example))
        if isinstance(example, tuple | list):
            return cls(tuple(example), {})
        return cls((example,), {})

    def random(self, seed: int) -> "Inputs":
        """The same shapes with other values: normal numbers for floats; integers and booleans stay as they are."""
        generator = torch.Generator().manual_seed(seed)
        return self._floats(lambda leaf: torch.randn(leaf.shape, generator=generator).to(leaf))

    def like(self, seed: int) -> "Inputs":
        """Other values between those that are there: for models that only take numbers of some range."""
        generator = torch.Generator().manual_seed(seed)

        def change(leaf: Tensor) -> Tensor:
            # Position by position over the batch, where there is one: columns may have ranges of their own.
            values = leaf.detach().cpu()
            values = values.flatten(1) if values.dim() > 1 and len(values) > 1 else values.reshape(-1, 1)
            one, two = (
                values.gather(0, torch.randint(len(values), values.shape, generator=generator)) for _ in range(2)
            )
            mixed = one + torch.rand(values.shape, generator=generator).to(one.dtype) * (two - one)
            return torch.where(mixed.isfinite(), mixed, one).view(leaf.shape).to(leaf)

        return self._floats(change)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Floats in another precision."""
        return self._floats(lambda leaf: leaf.to(dtype))

    def _floats(self, change: Any) -> "Inputs":
        def one(leaf: Any) -> Any:
            return change(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() else leaf

        return Inputs(tree_map(one, self.args), tree_map(one, dict(self.kwargs)))


class InPrecision(TorchFunctionMode):
    """Casts that a model's code writes out go to one precision, that of the copies which are compared."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.cast = {torch.float32: Tensor.float, torch.float64: Tensor.double}[dtype]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = self.cast if func in (Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.double) else func
        return func(*tree_map(self._change, args), **tree_map(self._change, kwargs or {}))

    def _change(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value.is_floating_point else value


class NotOf(TorchFunctionMode):
    """Refuse a copy that still reads the original's tensors."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.who = type(original).__name__
        named = [*original.named_parameters(), *original.named_buffers()]
        self.table = {id(tensor): name for name, tensor in named}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) in self.table:
                raise ModelError(
                    f"A copy of the model {self.who} still reads the original's {self.table[id(leaf)]!r}: the model "
                    "holds a function that holds on to the model, such as a lambda over self. Surgery works on a copy, "
                    "so call self's modules in forward instead."
                )
        return func(*args, **(kwargs or {}))


def outputs(
    model: nn.Module,
    inputs: Inputs,
    weights: Mapping[str, Tensor] | None = None,
    *,
    precision: torch.dtype | None = None,
    not_of: nn.Module | None = None,
) -> list[Tensor]:
    """All tensors a model returns in evaluation mode; what it draws it draws alike in every run.

    Args:
        model: the model.
        inputs: its inputs.
        weights: tensors to put in the place of its own.
        precision: where casts in its code are to go instead.
        not_of: the model it was copied from, of which it must not read anything.
    """
    with (
        evaluating(model),
        _same_noise(model),
        _written_out(),
        InPrecision(precision) if precision else nullcontext(),
        NotOf(not_of) if not_of is not None else nullcontext(),
    ):
        if weights is None:
            result = model(*inputs.args, **inputs.kwargs)
        else:
            every = _places(model, weights)
            result = functional_call(model, every, inputs.args, dict(inputs.kwargs), tie_weights=False)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _places(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by one name for every place that holds them.

    A tensor may lie in two modules, and a module under two names. PyTorch's own tying gives the second too, and swaps
    the module's tensor twice, so that what it restores is not what was there.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    found: dict[tuple[int, str], tuple[str, Tensor]] = {}
    for name, tensor in named:
        own = first.setdefault(id(tensor), name)
        path, _, leaf = name.rpartition(".")
        if own in weights:
            found.setdefault((id(modules[path]), leaf), (name, weights[own]))
    return dict(found.values())


def first_run(run: Callable[[Inputs], list[Tensor]], inputs: Inputs, name: str) -> list[Tensor]:
    """Run a model on the user's own inputs.

    Raises:
        ModelError: it cannot take them.
    """
    try:
        return run(inputs)
    except PrunusError:
        raise
    except Exception as error:
        raise ModelError(f"The model {name} cannot take these example inputs ({said(error)}).") from error


@contextmanager
def _same_noise(model: nn.Module) -> Iterator[None]:
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        torch.manual_seed(SEED)
        yield


@contextmanager
def _written_out() -> Iterator[None]:
    """Keep PyTorch's transformer layers off the fused kernels of inference, which leave padded positions at zero.

    They are taken or not by circumstances that differ between what is compared, such as the modes around a run.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def telling(tensors: Sequence[Tensor]) -> bool:
    """Can a comparison with these outputs tell anything: are there numbers, and nowhere NaN?"""
    floats = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return not any(bool(t.isnan().any()) for t in floats) and any(bool(t.isfinite().any()) for t in tensors)
