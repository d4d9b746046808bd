"""The multipliers of a budget: one float32 tensor, one entry a line, updated in place."""

import torch
from cooper.multipliers import DenseMultiplier
from torch import Tensor


class BudgetMultiplier(DenseMultiplier):
    """Cooper's dense multiplier with in-place projection and dual restarts.

    After a step lambda is projected onto lambda >= 0 (004 eq. 7); where the last violation seen says that the
    constraint is satisfied, lambda is set to zero at once (004 section 3.3, "dual restarts"), so that a met budget
    stops pressing. In place, so that the tensor can be captured in a CUDA graph and no optimizer loses its state.
    """

    def __init__(self, lines: int, restarts: bool, device: torch.device | None = None) -> None:
        super().__init__(num_constraints=lines, device=device, dtype=torch.float32)
        self.restarts = restarts
        self.last: Tensor | None = None

    @torch.no_grad()
    def ascend_(self, violation: Tensor, rate: float) -> None:
        """lambda <- [lambda + rate * violation]_+, then restarts."""
        self._project_(self.weight.add_(violation, alpha=rate))

    @torch.no_grad()
    def post_step_(self) -> None:
        """Project and restart; Cooper's optimizers call this after their dual step."""
        self._project_(self.weight)

    def _project_(self, weight: Tensor) -> None:
        weight.relu_()
        if self.restarts and self.last is not None:
            weight.mul_(self.last > 0)
