"""The exponential moving average of parameters (001 section 4.1: "temporal averaging")."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """theta-bar <- decay theta-bar + (1 - decay) theta after every step.

    The decay is warmed up as min(decay, (1 + t) / (10 + t)), so that the first steps do not weigh for ever.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.parameters = list(parameters)
        self.decay = decay
        self.steps = 0
        self.values: list[Tensor] = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take the present parameters in."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.values, [p.detach() for p in self.parameters], 1 - decay)

    @torch.no_grad()
    def take(self) -> None:
        """Put the average into the parameters, for good."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            parameter.data.copy_(value)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average into the parameters for a while."""
        own = [p.detach().clone() for p in self.parameters]
        self.take()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, own, strict=True):
                    parameter.data.copy_(value)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the present parameters."""
        self.steps = 0
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.copy_(parameter)
