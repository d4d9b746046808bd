"""A budget: inequality constraints on costs, and the multipliers that press for them.

    min over weights and gates of  E[loss]   subject to   cost_l(gates) / limit_l - 1 <= 0   for every line l

The Lagrangian is loss + sum_l lambda_l violation_l (004 eq. 6), with *relative* violations, so that one dual rate
serves all limits. The weights and gates follow the expected cost, which has a gradient; lambda follows the deployed
cost, which counts (proxy constraints: 004 section 4, Cotter et al. 2019), or the expected one if asked.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from cooper import Constraint, ConstraintState, ConstraintType
from cooper.formulations import Formulation, Lagrangian
from cooper.penalty_coefficients import PenaltyCoefficient
from torch import Tensor
from torch.autograd.function import once_differentiable

from prunus.budget.lines import Line, chooser, read_lines
from prunus.budget.multiplier import BudgetMultiplier
from prunus.cost import Row
from prunus.errors import ArtefactError, BudgetError, ModelError, is_number, warn
from prunus.gated import Gated
from prunus.measure import rounded
from prunus.rows import Rows


class Budget:
    """What the deployed network may cost.

    Args:
        gated: the gated model.
        params, macs, bytes: limits of the whole model: a fraction (0.1, "10%") or an absolute number (100_000, "4MB").
        density: a limit in the papers' one-sided counting, of the whole model or by layer ({"conv1": 0.5}).
        layers: limits by layer or pattern: {"conv1": 0.5} on parameters, {"fc*": {"macs": 0.3}} on others.
        lines: the same, already read (`prunus.budget.parse`).
        dual_rate: step size of the multipliers.
        restarts: set a multiplier to zero when its line is met (004 section 3.3).
        dual: what the multipliers watch, the "deployed" or the "expected" cost.
        extrapolate: extrapolation from the past for the multipliers (004 section 3.3; use it together with
            `prunus.ExtrapolationFromThePast` around the optimizer of weights and gates).
        formulation, penalty: another of Cooper's formulations, such as its augmented Lagrangian with a coefficient.

    Raises:
        BudgetError: a limit cannot be read, names no layer, contradicts another, or cannot be reached.
    """

    def __init__(
        self,
        gated: Gated,
        *,
        params: float | int | str | None = None,
        macs: float | int | str | None = None,
        bytes: float | int | str | None = None,
        density: float | str | Mapping[str, float | str] | None = None,
        layers: Mapping[str, Any] | None = None,
        lines: tuple[Line, ...] | None = None,
        dual_rate: float = 5e-3,
        restarts: bool = True,
        dual: str = "deployed",
        extrapolate: bool = False,
        formulation: type[Formulation] = Lagrangian,
        penalty: PenaltyCoefficient | None = None,
    ) -> None:
        if not isinstance(gated, Gated):
            raise ModelError(f"A budget is made for what prunus.gate returned; this is a {type(gated).__name__}.")
        if dual not in ("deployed", "expected"):
            raise BudgetError(f"dual={dual!r}: the multipliers can watch the 'deployed' or the 'expected' cost.")
        if not is_number(dual_rate) or not 0 < dual_rate < math.inf:
            raise BudgetError(f"dual_rate={dual_rate!r} must be above zero.")
        totals = {"params": params, "macs": macs, "bytes": bytes, "density": density}
        self.lines = lines or read_lines(totals, layers)
        _check_formulation(formulation, penalty, len(self.lines))
        if gated.budget is not None:
            warn(
                f"This model has a budget already ({', '.join(map(str, gated.budget.lines))}): the new one takes its "
                "place. One budget can hold several limits."
            )
        self.gated = gated
        self.dual_rate, self.dual, self.extrapolate = float(dual_rate), dual, extrapolate
        self.count()
        self.multiplier = BudgetMultiplier(len(self.lines), restarts, gated.log_alpha.device)
        self.constraint = Constraint(
            constraint_type=ConstraintType.INEQUALITY,
            formulation_type=formulation,
            multiplier=self.multiplier,
            penalty_coefficient=penalty,
        )
        self._strict: Tensor | None = None
        self._previous: Tensor | None = None
        gated.budget = self

    def count(self) -> None:
        """Count the limits of the gated model as it is now: anew after it was converted to another precision.

        Raises:
            BudgetError: a limit names no layer, or cannot be reached.
        """
        cost, device = self.gated.cost, self.gated.log_alpha.device
        choosers = [chooser(self.gated.graph, line) for line in self.lines]
        asked = [(line.row, chosen) for line, chosen in zip(self.lines, choosers, strict=True)]
        self._rows, self._closing = cost.rows(asked), cost.rows(asked, nesting=True)
        density = [Row("density", line.where) for line in self.lines]
        self._paper = cost.rows(zip(density, choosers, strict=True))
        every = torch.ones(self.gated.units, dtype=torch.float64)
        self.dense: list[float] = self._rows(every).tolist()
        for k, (line, chosen) in enumerate(zip(self.lines, choosers, strict=True)):
            if line.what == "bytes":
                self.dense[k] = float(cost.dense_bytes(chosen))
        self.has_paper = [value > 0 for value in self._paper(every).tolist()]
        limits = [
            line.limit.value * dense if line.limit.is_fraction else line.limit.value
            for line, dense in zip(self.lines, self.dense, strict=True)
        ]
        self.limits = torch.tensor(limits, dtype=torch.float64)
        self._check_reach()
        self.now = self.limits.clone()
        self._move(device)

    def _check_reach(self) -> None:
        gated = self.gated
        lowest = torch.full((gated.units,), gated.gates.low)
        device = gated.log_alpha.device
        self.reach: list[float] = self._rows(gated.open_units(lowest.to(device)).cpu()).tolist()
        highest, openness = torch.full((gated.units,), gated.gates.high, device=device), gated.openness
        every = openness.kept(openness.key(highest), gated.threshold) if gated.units else highest
        self.most: list[float] = self._rows(
            every.cpu()
        ).tolist()  # all gates open: the dense cost, but for n of every m
        floor = self._rows(gated.openness.expected(gated.gates.p_active(lowest))).tolist()
        for k, line in enumerate(self.lines):
            limit, dense, least = float(self.limits[k]), self.dense[k], self.reach[k]
            if not dense:
                raise BudgetError(f"The budget {line} counts nothing: there is no {line.what} in it to spend.")
            if limit < least * (1 - 1e-12):
                left = "one unit" if gated.round_to == 1 else f"round_to={gated.round_to} units"
                why = f"with {left} left in every group" if gated.units else "because nothing in this model can shrink"
                raise BudgetError(
                    f"The budget {line} cannot be reached: it allows {_number(limit, line)}, and the least possible is "
                    f"{_number(least, line)} ({least / dense:.2%} of the dense model's {_number(dense, line)}), "
                    f"{why}."
                )
            if self.dual == "expected" and limit < floor[k]:
                raise BudgetError(
                    f"The budget {line} cannot be reached by the expected cost, which never falls below "
                    f"{_number(floor[k], line)} because closed gates keep a small probability; use dual='deployed'."
                )
            if limit >= self.most[k]:
                whose = "the dense model costs" if self.most[k] == dense else "the model costs with all gates open"
                warn(f"The budget {line} allows what {whose}, {_number(self.most[k], line)}: it does nothing.")

    def _move(self, device: torch.device) -> None:
        self.limits, self.now = self.limits.to(device), self.now.to(device)
        for rows in (self._rows, self._closing, self._paper):
            rows.to(device)

    def tighten(self, progress: float) -> None:
        """Let the limits fall geometrically from the cost with all gates open (progress 0) to what was asked for (1).

        Gates close by what they are worth only while the loss can still answer; a limit that is far below the present
        cost drives the multipliers up until everything closes at once.
        """
        if not is_number(progress):
            raise BudgetError(f"tighten takes how far the limits have come down, from 0 to 1, not {progress!r}.")
        share = min(1.0, max(0.0, float(progress)))
        most = torch.tensor(self.most, dtype=torch.float64, device=self.limits.device)
        self.now.copy_(self.limits.clamp(max=most) ** share * most ** (1 - share) if share < 1 else self.limits)

    # ---- in a training loop ----------------------------------------------------------------------------------------

    def state(self) -> ConstraintState:
        """The violations now, as Cooper takes them: `violation` for the gradient, `strict_violation` for the duals."""
        self._prepare()
        expected, deployed = _Violations.apply(self.gated.p_active(), self.gated.nearly_open(), self._rows, self.now)
        self._see(expected.detach(), deployed)
        return ConstraintState(violation=expected, strict_violation=self._strict)

    def _prepare(self) -> None:
        if self.limits.device != self.gated.log_alpha.device:
            self._move(self.gated.log_alpha.device)
            self.multiplier.to(self.gated.log_alpha.device)

    def _see(self, expected: Tensor, deployed: Tensor) -> None:
        """Remember the violations that the multipliers are to follow."""
        self._strict = deployed if self.dual == "deployed" else expected
        self.multiplier.last = self._strict

    def pressure(self) -> Tensor:
        """What to add to the loss: sum_l lambda_l (expected cost_l / limit_l - 1), differentiable in the gates."""
        if self.gated.fixed:
            return self.limits.new_zeros((), dtype=torch.float32)
        if self.constraint.formulation_type is Lagrangian:
            multipliers = self.multiplier.weight.detach()
            if self.extrapolate and self._previous is not None:
                multipliers = (multipliers + self.dual_rate * self._previous).relu()
            if self.gated.openness.most:  # whose probabilities are not each gate's own
                return torch.dot(multipliers, self.state().violation)
            self._prepare()
            value, expected, deployed = _Pressure.apply(self.gated.log_alpha, multipliers, self)
            self._see(expected, deployed)
            return value
        state = self.state()
        contribution = self.constraint.compute_contribution_to_lagrangian(state, "primal")
        assert contribution is not None
        return contribution.lagrangian_contribution

    def step(self) -> None:
        """One step of dual ascent: lambda <- [lambda + rate * violation]_+, with restarts; call it after the optimizer.

        It uses the violation that the last `pressure()` (or `state()`) saw: the updates are simultaneous (004 eq. 7).
        """
        if self.gated.fixed:
            return
        if self._strict is None:
            with torch.no_grad():
                self.state()
        assert self._strict is not None
        self.multiplier.ascend_(self._strict, self.dual_rate)
        self._previous = self._strict
        self._strict = None

    # ---- what it says ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def readings(self) -> list[dict[str, Any]]:
        """Every line with its limit and its cost read three ways, and its multiplier."""
        self._prepare()
        p = self.gated.p_active().double()
        both = self._rows(torch.stack([p, self.gated.open_units()]))
        paper = self._paper(p).tolist()
        expected, deployed = both.tolist()
        multipliers = self.multiplier.weight.tolist()
        result = []
        for k, line in enumerate(self.lines):
            limit = float(self.limits[k])
            result.append(
                {
                    "what": line.what,
                    "where": line.where,
                    "limit": limit,
                    "dense": self.dense[k],
                    "expected": expected[k],
                    "deployed": deployed[k] if line.what == "density" else rounded(deployed[k]),
                    "paper": paper[k] if self.has_paper[k] else None,
                    "multiplier": multipliers[k],
                    "met": deployed[k] <= limit * (1 + 1e-12),
                }
            )
        return result

    def costs(self, open_: Tensor) -> Tensor:
        """The lines' costs of a Keep's openness, 0 and 1, with the slopes in what closes along: for the landing."""
        return self._closing(open_)

    def met(self) -> bool:
        """Is every line met by the deployed cost?"""
        return all(reading["met"] for reading in self.readings())

    def state_dict(self) -> dict[str, Tensor]:
        """The multipliers and what extrapolation remembers."""
        state = {"multiplier": self.multiplier.weight.detach().clone()}
        if self._previous is not None:
            state["previous"] = self._previous.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Read it back, in place.

        Raises:
            ArtefactError: it is another budget's.
        """
        there = state.get("multiplier")
        if there is None or there.shape != self.multiplier.weight.shape:
            raise ArtefactError(f"This is not the state of a budget of {len(self.lines)} limits, as {self} is.")
        with torch.no_grad():
            self.multiplier.weight.copy_(state["multiplier"])
        self._previous = state["previous"].to(self.multiplier.weight) if "previous" in state else None

    def __repr__(self) -> str:
        return f"Budget({', '.join(map(str, self.lines))})"


def _evaluate(p: Tensor, open_: Tensor, rows: Rows, limits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Relative violations by the expected and by the deployed cost, evaluated together, and what their slopes need."""
    both = torch.stack([p, open_]).double()
    moments = torch.maximum(rows.moments(both), rows.least)  # every group keeps a unit
    slopes = rows.slopes(moments)
    expected, deployed = (rows.costs(moments, slopes) / limits - 1).float().unbind(0)
    return expected, deployed, both[0], slopes[0]


class _Violations(torch.autograd.Function):
    """Relative violations as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, open_: Tensor, rows: Rows, limits: Tensor) -> tuple[Tensor, Tensor]:
        expected, deployed, *rest = _evaluate(p, open_, rows, limits)
        ctx.save_for_backward(*rest, limits)
        ctx.rows = rows
        ctx.mark_non_differentiable(deployed)
        return expected, deployed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        p, slopes, limits = ctx.saved_tensors
        return ctx.rows.gradient(p, slopes, grad / limits).float(), None, None, None


class _Pressure(torch.autograd.Function):
    """lambda . violation as one operation: its gradient in log alpha is known when its value is."""

    @staticmethod
    def forward(ctx: Any, log_alpha: Tensor, multipliers: Tensor, budget: Budget) -> tuple[Tensor, Tensor, Tensor]:
        gated, rows, limits = budget.gated, budget._rows, budget.now
        p = gated.gates.p_active(log_alpha)
        expected, deployed, wide, slopes = _evaluate(p, gated.nearly_open(), rows, limits)
        by_p = rows.gradient(wide, slopes, multipliers / limits)
        ctx.save_for_backward(torch.ops.aten.sigmoid_backward(by_p.float(), p))
        ctx.mark_non_differentiable(expected, deployed)
        return torch.dot(multipliers, expected), expected, deployed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad * gradient, None, None


def _check_formulation(formulation: Any, penalty: Any, lines: int) -> None:
    """Refuse what Cooper would stumble over later."""
    is_one = isinstance(formulation, type) and issubclass(formulation, Formulation)
    if not is_one:
        raise BudgetError(f"formulation is {formulation!r}; it must be one of Cooper's classes, such as Lagrangian.")
    if not formulation.expects_multiplier:
        raise BudgetError(f"{formulation.__name__} knows no multipliers, and a budget is kept by them; use Lagrangian.")
    if formulation.expects_penalty_coefficient != (penalty is not None):
        needs = "needs a" if formulation.expects_penalty_coefficient else "takes no"
        raise BudgetError(f"{formulation.__name__} {needs} penalty coefficient: Budget(..., penalty=...).")
    size = penalty().numel() if penalty is not None else lines
    if size not in (1, lines):
        raise BudgetError(f"The penalty coefficient has {size} entries for {lines} limits.")


def _number(value: float, line: Line) -> str:
    if line.what == "density":
        return f"{value:.2%}"
    word = {"params": "parameter", "macs": "MAC", "bytes": "byte"}[line.what]
    return f"{value:,.0f} {word}{'s' * (round(value) != 1)}"
