"""What example inputs are like, as JSON: structure, shapes and dtypes, and from that inputs to export a model with."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from prunus.errors import ArtefactError
from prunus.surgery.trial import Inputs

LARGEST = 2**28  # numbers in all inputs that a stranger's file may make us allocate
DEEPEST = 34
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    )
}  # fmt: skip


def described(inputs: Inputs) -> Any:
    """Write inputs as JSON; None where something in them cannot be written.

    >>> described(Inputs.of(torch.zeros(2, 3)))
    ['args', [['tensor', [2, 3], 'float32']], {}]
    """
    try:
        return ["args", [_written(arg) for arg in inputs.args], {k: _written(v) for k, v in inputs.kwargs.items()}]
    except TypeError:
        return None


def _written(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ["tensor", list(value.shape), str(value.dtype).removeprefix("torch.")]
    if value is None or type(value) in (bool, int, float, str):
        return ["value", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_written(v) for v in value]]
    if type(value) is dict and all(type(k) is str for k in value):
        return ["dict", {k: _written(v) for k, v in value.items()}]
    raise TypeError(type(value).__name__)


def fabricated(written: Any, model: nn.Module) -> Inputs:
    """Make inputs like those that were described, where the model's parameters are: numbers at random, indices zero."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    if _numbers(written) > LARGEST:
        raise ArtefactError("The plan's example inputs are larger than any that Prunus takes from a file.")

    def made(value: Any) -> Any:
        kind, held = value[0], value[1]
        if kind == "tensor":
            shape, dtype = held, DTYPES[value[2]]
            if dtype.is_floating_point:
                return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
            return torch.zeros(shape, dtype=dtype, device=device)
        if kind == "value" and (held is None or type(held) in (bool, int, float, str)):
            return held
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(made(v) for v in held)
        if kind == "dict":
            return {k: made(v) for k, v in held.items()}
        raise ArtefactError("The plan holds example inputs that are not written as Prunus writes them.")

    _, args, kwargs = written
    return Inputs(tuple(made(v) for v in args), {k: made(v) for k, v in kwargs.items()})


def _numbers(value: Any, depth: int = 0) -> int:
    """How many numbers described inputs would hold in all."""
    if depth > DEEPEST:
        raise ArtefactError("The plan's example inputs are nested deeper than any that Prunus writes.")
    if isinstance(value, list) and len(value) == 3 and value[0] == "tensor":
        if not isinstance(value[1], list) or any(type(size) is not int or not 0 < size < 2**31 for size in value[1]):
            raise ArtefactError("The plan's example inputs have sizes that no tensor has.")
        return prod(value[1])
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(_numbers(part, depth + 1) for part in parts)
