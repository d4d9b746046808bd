r"""Penalised L0 (Louizos, Welling, Kingma 2018: seed 001), beside the constrained form that `prunus.Budget` is.

    loss + sum_l lambda_l  E||theta_l||_0,    E||theta_l||_0 = sum_g |g| P(z_g != 0)          (001 eq. 9, 12, 16)

The count is the paper's, one-sided: a weight belongs to its output map (convolution) or its input (linear layer). The
seeds write lambda as x/N with N the number of training examples ("0.1/N"); both spellings are read.

Where we deviate: the paper's published code counts biases with their layer; here only gated weights count, as its text
does ("we ignore the bias": 004, footnote 2).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from prunus.budget.lines import Limit, Line, chooser
from prunus.errors import BudgetError, ModelError
from prunus.gated import Gated


def read_strength(value: float | str, examples: int | None) -> float:
    """Read lambda: a number, or "x/N" with N the number of training examples.

    >>> read_strength("0.1/N", 60_000) == 0.1 / 60_000
    True
    """
    if isinstance(value, str) and value.replace(" ", "").upper().endswith("/N"):
        if not isinstance(examples, int) or examples < 1:
            raise BudgetError(f"The strength {value!r} needs the number of training examples: Penalty(examples=...).")
        return read_strength(value.replace(" ", "")[:-2], None) / examples
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise BudgetError(f"The strength {value!r} is no number at or above zero; write 1e-6 or 0.1/N.")
    return number


class Penalty:
    """Penalised L0: the same `pressure()` and `step()` as a budget, with lambda given instead of found.

    Args:
        gated: the gated model.
        strength: lambda for all layers (1e-6, "0.1/N"), or one a layer or pattern ({"conv1": "10/N", "fc*": "0.1/N"}).
        examples: N, the number of training examples, where "/N" is written.
    """

    def __init__(
        self, gated: Gated, strength: float | str | Mapping[str, float | str], examples: int | None = None
    ) -> None:
        if not isinstance(gated, Gated):
            raise ModelError(f"A penalty is made for what prunus.gate returned; this is a {type(gated).__name__}.")
        by_layer = strength if isinstance(strength, Mapping) else {None: strength}
        if not by_layer:
            raise BudgetError("A penalty needs a strength, or one a layer: {'conv1': '10/N', 'fc*': '0.1/N'}.")
        self.gated = gated
        self.strengths = {where: read_strength(value, examples) for where, value in by_layer.items()}
        weight = torch.zeros(gated.units, dtype=torch.float64)
        for where, lambda_ in self.strengths.items():
            chosen = chooser(gated.graph, Line("density", where, Limit(1.0, True)))
            for tensor, by_group in gated.cost.one_sided.items():
                if chosen(tensor):
                    for group, numbers in by_group.items():
                        start = gated.cost.offsets[group]
                        weight[start : start + gated.graph.sizes[group]] += lambda_ * numbers
        self._weight = weight.float().to(gated.log_alpha.device)

    def pressure(self) -> Tensor:
        """What to add to the loss: lambda times the expected L0 norm."""
        if self._weight.device != self.gated.log_alpha.device:
            self._weight = self._weight.to(self.gated.log_alpha.device)
        if self.gated.fixed:
            return self._weight.new_zeros(())
        return (self.gated.p_active() * self._weight).sum()  # a matrix product would be cast under autocast

    def step(self) -> None:
        """Nothing to update: lambda is given."""
