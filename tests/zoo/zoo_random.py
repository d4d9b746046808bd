"""Weights and inputs of the zoo: random, nothing special about any of them, and the same at every call."""

import functools
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

VOCAB = 50


def randomise(model: nn.Module, gain: float = 1.0) -> None:
    """Draw all parameters and all batch-norm statistics: none is zero or one, none repeats."""
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            with torch.no_grad():
                draw(module, name, value, gain)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)


def draw(module: nn.Module, name: str, value: Tensor, gain: float) -> None:
    """Scales and norms around one, biases around zero, weights so that activations keep their size."""
    if value.dim() < 2:
        if "bias" in name or name == "beta":
            value.normal_(std=0.2)
        else:
            value.uniform_(0.5, 1.5)
    elif isinstance(module, nn.Embedding) or value.shape[0] == 1:  # tables, and tokens shared by the batch
        value.normal_(std=0.7)
    else:
        value.normal_(std=gain / math.sqrt(value[0].numel()))


P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)


def seeded(gain: float = 1.0) -> Callable[[Callable[P, M]], Callable[P, M]]:
    """Make a builder give the same randomised model each time, and leave the caller's generator alone.

    A gain above one suits deep plain networks, in which the input would otherwise drown in the biases.
    """

    def decorate(build: Callable[P, M]) -> Callable[P, M]:
        @functools.wraps(build)
        def make(*args: P.args, **kwargs: P.kwargs) -> M:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = build(*args, **kwargs)
                randomise(model, gain)
            return model

        return make

    return decorate


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(size: int = 32, channels: int = 3) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (normal(2, channels, size, size),)


def vectors(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (normal(2, *shape),)


def words(length: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def padding(length: int = 9) -> Tensor:
    """The attention mask of two sentences of which the second is two words shorter."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, -2:] = 0
    return mask
