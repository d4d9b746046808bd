"""Measured facts about any module: what it stores, what it multiplies, how long it takes. Nothing here is estimated."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode without gradients; afterwards every submodule has its mode and buffers again.

    A model may count or average in its forward pass: measuring it must not train it.
    """
    modules = [module for model in models for module in model.modules()]
    modes = [(module, module.training) for module in modules]
    buffers = [
        (module._buffers, name, old, _version(old), old.clone())
        for module in modules
        for name, old in module._buffers.items()
        if old is not None
    ]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for there, name, old, version, value in buffers:
                if there.get(name) is not old:
                    there[name] = old
                if _version(old) != version:
                    old.copy_(value)


def _version(tensor: Tensor) -> int:
    """How often it was changed in place; inference tensors do not say, and cannot be changed outside inference."""
    return -1 if tensor.is_inference() else tensor._version


def count_params(model: nn.Module) -> int:
    """Numbers in the parameters, shared ones once.

    >>> count_params(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in model.parameters())


def count_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and the buffers that are saved, shared ones once."""
    seen: dict[int, int] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        if isinstance(tensor, Tensor):
            seen[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def count_macs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> int:
    """Multiply-accumulates of one example in a forward pass, as PyTorch's own counter sees them.

    Matrix products and convolutions count; additions of biases and elementwise operations do not.
    """
    return rounded(total_macs(model, args, kwargs) / batch_size(args, kwargs))


def total_macs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> int:
    """Those of all examples together."""
    with evaluating(model), counting() as counter:
        model(*args, **(kwargs or {}))
    return counter.get_total_flops() // 2


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """PyTorch's own counter, with fused operations that it does not know (attention, LSTM) done in their parts."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    (quick,) = torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=None)[:1]
    cudnn, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    counter = FlopCounterMode(display=False, custom_mapping=VECTORS)
    counter.mod_tracker = _Nowhere()  # type: ignore[assignment]
    try:
        with sdpa_kernel(SDPBackend.MATH), counter, _SummedProducts():
            yield counter
    finally:
        torch.backends.cudnn.enabled = cudnn
        torch.backends.mkldnn.set_flags(_enabled=quick, _fp32_precision=None)
        torch.backends.mha.set_fastpath_enabled(fast)


class _Nowhere:
    """In place of PyTorch's tracker of modules, which cannot take views of parameters without gradients."""

    parents = frozenset({"Global"})

    def __enter__(self) -> "_Nowhere":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _with_vector(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a)


VECTORS = {  # products with vectors, which PyTorch's counter leaves out
    torch.ops.aten.mv: _with_vector,
    torch.ops.aten.dot: _with_vector,
    torch.ops.aten.vdot: _with_vector,
    torch.ops.aten.addmv: lambda bias, a, b, *_, **__: _with_vector(a, b),
}


class _SummedProducts(TorchFunctionMode):
    """Do what einsum does by a matrix product, always.

    PyTorch takes an elementwise product where what is summed over has one position, which its counter does not count: a
    model would then get cheaper by more than it shrinks.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
            equation = spelled_out(args[0], [operand.dim() for operand in args[1:]])
            if equation is not None:
                return _as_matmul(equation, *args[1:])
        return func(*args, **(kwargs or {}))


def spelled_out(equation: str, ranks: Sequence[int]) -> str | None:
    """A sum of products with a label for every dimension that "..." stands for; None where that says too little.

    >>> spelled_out("...id, ...jd -> ...ij", [4, 4])
    'ABid,ABjd->ABij'
    """
    left, arrow, out = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(ranks) or ("..." in left and not arrow):
        return None
    short = [part.replace("...", "") for part in parts]
    hidden = [rank - len(one) if one != part else 0 for one, part, rank in zip(short, parts, ranks, strict=True)]
    letters = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in equation]
    most = max(hidden, default=0)
    if most > len(letters):
        return None
    names = letters[:most]
    spelled = [part.replace("...", "".join(names[most - n :])) for part, n in zip(parts, hidden, strict=True)]
    return ",".join(spelled) + arrow + out.replace("...", "".join(names))


def _as_matmul(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """The sum of products of two tensors that labels describe, as one batched matrix product."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    one, two = left.split(",")
    if not arrow:
        out = "".join(sorted(label for label in set(one + two) if (one + two).count(label) == 1))
    size = dict(zip(one + two, (*a.shape, *b.shape), strict=True))
    batch = [label for label in out if label in one and label in two]
    rows = [label for label in one if label not in two]
    columns = [label for label in two if label not in one]
    over = [label for label in one if label in two and label not in out]

    def shaped(tensor: Tensor, labels: str, *parts: list[str]) -> Tensor:
        tensor = tensor.permute([labels.index(label) for part in parts for label in part])
        return tensor.reshape([math.prod(size[label] for label in part) for part in parts])

    product = torch.bmm(shaped(a, one, batch, rows, over), shaped(b, two, batch, over, columns))
    full = product.reshape([size[label] for label in [*batch, *rows, *columns]])
    gone = [k for k, label in enumerate([*batch, *rows, *columns]) if label not in out]
    full = full.sum(gone) if gone else full
    kept = [label for label in [*batch, *rows, *columns] if label in out]
    return full.permute([kept.index(label) for label in out])


def rounded(count: float) -> int:
    """A count of one example as a whole number; the nearest one, halves go down, where the batch does not divide it.

    >>> rounded(421.5), rounded(421.7)
    (421, 422)
    """
    return math.ceil(count - 0.5 - 1e-6)


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> int:
    """The first dimension of the first tensor."""
    for leaf in tree_leaves((tuple(args), dict(kwargs or {}))):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return 1


def with_batch(
    args: Sequence[Any], batch: int, kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs repeated or cut to another batch size: every tensor that has the batch dimension."""
    old = batch_size(args, kwargs)

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == old:
            return leaf.repeat((batch + old - 1) // old, *[1] * (leaf.dim() - 1))[:batch]
        return leaf

    return tuple(tree_map(change, tuple(args))), tree_map(change, dict(kwargs or {}))


def latencies(
    calls: Mapping[str, Callable[[], Any]], seconds: float = 0.15, device: torch.device | None = None
) -> dict[str, dict[str, float]]:
    """Median and spread (interquartile range) in milliseconds, the calls taking turns so that each meets the same load.

    >>> sorted(latencies({"nothing": lambda: None}, seconds=0.01)["nothing"])
    ['median', 'spread']
    """
    cuda = device is not None and device.type == "cuda"

    def once(call: Callable[[], Any]) -> float:
        if cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for name, call in calls.items():
            times[name].append(once(call))
    result = {}
    for name, values in times.items():
        low, _, high = quantiles(values, n=4)
        result[name] = {"median": round(median(values), 4), "spread": round(high - low, 4)}
    return result
