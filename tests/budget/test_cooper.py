"""A budget as one of several constraints in a user's own problem, under Cooper's optimizers."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from budget_models import INPUTS, counted, mlp
from cooper import CMPState, ConstrainedMinimizationProblem, Constraint, ConstraintState, ConstraintType
from cooper.formulations import AugmentedLagrangian, Lagrangian
from cooper.multipliers import DenseMultiplier
from cooper.optim import (
    AlternatingDualPrimalOptimizer,
    AlternatingPrimalDualOptimizer,
    ExtraAdam,
    ExtrapolationConstrainedOptimizer,
    ExtraSGD,
    SimultaneousOptimizer,
)
from cooper.penalty_coefficients import DensePenaltyCoefficient
from torch import Tensor
from torch.nn import functional as F

import prunus
from prunus.budget import Budget
from prunus.gated import Gated

OPTIMIZERS = [
    SimultaneousOptimizer,
    AlternatingPrimalDualOptimizer,
    AlternatingDualPrimalOptimizer,
    ExtrapolationConstrainedOptimizer,
]
BOUND = 2.0  # on the squared norm of the last layer's weights, the user's other constraint


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def task() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(48, 6, generator=generator)
    return x, torch.stack([x[:, 0] - x[:, 1], 2 * x[:, 1], x[:, 0]], 1)


def gated_mlp() -> Gated:
    torch.manual_seed(0)
    return prunus.gate(mlp(), INPUTS["mlp"]())


class Problem(ConstrainedMinimizationProblem):
    """A loss of the user's, the budget, and a bound on the norm of the last layer."""

    def __init__(self, gated: Gated, budget: Budget) -> None:
        super().__init__()
        self.gated, self.of_prunus = gated, budget
        self.x, self.y = task()
        self.size = budget.constraint
        self.norm = Constraint(ConstraintType.INEQUALITY, Lagrangian, DenseMultiplier(1))
        self.seed = 0

    def compute_cmp_state(self) -> CMPState:
        torch.manual_seed(self.seed)
        loss = F.mse_loss(self.gated(self.x), self.y)
        norm = ConstraintState(violation=norm_of(self.gated) / BOUND - 1)
        return CMPState(loss, {self.size: self.of_prunus.state(), self.norm: norm})


def norm_of(gated: Gated) -> Tensor:
    return gated.model.get_parameter("4.weight").square().sum()


def params_of(gated: Gated) -> int:
    return counted(gated, gated.keep(), INPUTS["mlp"]())["params"]


def optimizer_for(problem: Problem, kind: Any, rates: tuple[float, float], plain: bool = False) -> Any:
    """Cooper's optimizer over weights, gates and both multipliers, each with a rate of its own."""
    extra = kind is ExtrapolationConstrainedOptimizer
    first: Any = (ExtraSGD if extra else torch.optim.SGD) if plain else (ExtraAdam if extra else torch.optim.Adam)
    dual: Any = ExtraSGD if extra else torch.optim.SGD
    weight_rate, gate_rate = (0.05, 2.0) if plain else (0.02, 0.05)
    primal = first(
        [
            {"params": list(problem.gated.weight_parameters()), "lr": weight_rate},
            {"params": list(problem.gated.gate_parameters()), "lr": gate_rate},
        ],
        lr=weight_rate,
    )
    assert problem.size.multiplier is not None
    assert problem.norm.multiplier is not None
    duals = [
        dual([problem.size.multiplier.weight], lr=rates[0], maximize=True),
        dual([problem.norm.multiplier.weight], lr=rates[1], maximize=True),
    ]
    return kind(problem, primal, duals)


# ---- both constraints are met ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("formulation", [Lagrangian, AugmentedLagrangian])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_both_constraints_are_met_that_were_violated(kind: Any, formulation: Any) -> None:
    gated = gated_mlp()
    penalty = DensePenaltyCoefficient(torch.tensor(0.5)) if formulation is AugmentedLagrangian else None
    budget = Budget(gated, params=0.6, formulation=formulation, penalty=penalty)
    problem = Problem(gated, budget)
    optimizer = optimizer_for(problem, kind, rates=(0.03, 0.1))
    multiplier = budget.multiplier.weight
    limit, start = 0.6 * 74, F.mse_loss(gated.eval()(problem.x), problem.y).item()
    assert params_of(gated) == 74
    assert norm_of(gated).item() > 1.5 * BOUND
    gated.train()
    size, norm, restarts = [], [], 0
    for step in range(160):
        problem.seed = step
        budget.tighten(step / 90)
        before = multiplier.item()
        optimizer.roll()
        size.append(multiplier.item())
        norm.append(problem.norm.multiplier.weight.item())
        restarts += before > 0 and size[-1] == 0
        assert budget.multiplier.last is not None
        assert size[-1] >= 0
        assert size[-1] == 0 or budget.multiplier.last.item() > 0
    assert max(size) > 0.01
    assert max(norm) > 0.1
    assert restarts > 0
    assert budget.multiplier.weight is multiplier
    assert params_of(gated) <= 1.05 * limit
    assert norm_of(gated).item() <= 1.05 * BOUND
    assert F.mse_loss(gated.eval()(problem.x), problem.y).item() < 0.8 * start
    small, receipt = prunus.shrink(gated, problem.x, batches=())
    assert receipt["deployed"]["params"] <= limit
    assert sum(p.numel() for p in small.parameters()) == receipt["deployed"]["params"]


def test_without_the_budget_the_problem_does_not_shrink() -> None:
    """What the test above sees is the budget's doing: with its multiplier at rest nothing closes."""
    gated = gated_mlp()
    budget = Budget(gated, params=0.6)
    problem = Problem(gated, budget)
    optimizer = optimizer_for(problem, SimultaneousOptimizer, rates=(0.0, 0.1))
    for step in range(160):
        problem.seed = step
        optimizer.roll()
    assert budget.multiplier.weight.item() == 0
    assert params_of(gated) > 0.7 * 74


# ---- step by step ----------------------------------------------------------------------------------------------------


class PlainProblem:
    """The same problem without Cooper and without Prunus' budget: formulas by hand, multipliers as floats."""

    def __init__(self, restarts: bool) -> None:
        self.gated, self.restarts = gated_mlp(), restarts
        self.x, self.y = task()
        self.weights, self.log_alpha = list(self.gated.weight_parameters()), self.gated.log_alpha
        self.multipliers = [0.0, 0.0]
        self.seen = [0.0, 0.0]
        self.rates = (0.4, 0.3)

    def primal(self, multipliers: list[float]) -> list[Tensor]:
        """The gradient of the Lagrangian in weights and gates."""
        torch.manual_seed(0)
        loss = F.mse_loss(self.gated(self.x), self.y)
        i, a, b = (p.sum() for p in torch.sigmoid(self.log_alpha - 2 / 3 * math.log(0.1 / 1.1)).split([6, 5, 4]))
        violation = (i * a + a + a * b + b + 3 * b + 3) / 37 - 1
        total = loss + multipliers[0] * violation + multipliers[1] * (norm_of(self.gated) / BOUND - 1)
        return list(torch.autograd.grad(total, [*self.weights, self.log_alpha]))

    def violations(self) -> list[float]:
        """By the deployed network, and by the norm."""
        opened = self.log_alpha.detach() > 2 / 3 * math.log(0.1 / 1.1)
        i, a, b = (max(1, int(part.sum())) for part in opened.split([6, 5, 4]))
        return [(i * a + a + a * b + b + 3 * b + 3) / 37 - 1, norm_of(self.gated).item() / BOUND - 1]

    def descend(self, gradient: list[Tensor]) -> None:
        with torch.no_grad():
            for value, slope in zip([*self.weights, self.log_alpha], gradient, strict=True):
                value -= (2.0 if value is self.log_alpha else 0.05) * slope

    def ascended(self, violations: list[float]) -> list[float]:
        pairs = zip(self.multipliers, self.rates, violations, strict=True)
        moved = [max(0.0, multiplier + rate * violation) for multiplier, rate, violation in pairs]
        if self.restarts and violations[0] <= 0:
            moved[0] = 0.0
        return moved

    def simultaneous(self) -> None:
        gradient, violations = self.primal(self.multipliers), self.violations()
        self.descend(gradient)
        self.multipliers = self.ascended(violations)

    def primal_first(self) -> None:
        self.descend(self.primal(self.multipliers))
        self.multipliers = self.ascended(self.violations())

    def dual_first(self) -> None:
        self.multipliers = self.ascended(self.violations())
        self.descend(self.primal(self.multipliers))

    def extrapolated(self) -> None:
        gradient, violations = self.primal(self.multipliers), self.violations()
        start = [value.detach().clone() for value in [*self.weights, self.log_alpha]]
        self.descend(gradient)
        ahead = self.ascended(violations)
        gradient, violations = self.primal(ahead), self.violations()
        with torch.no_grad():
            for value, old in zip([*self.weights, self.log_alpha], start, strict=True):
                value.copy_(old)
        self.descend(gradient)
        self.multipliers = self.ascended(violations)


STEPS: list[Callable[[PlainProblem], None]] = [
    PlainProblem.simultaneous, PlainProblem.primal_first, PlainProblem.dual_first, PlainProblem.extrapolated
]  # fmt: skip


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("kind, plain_step", list(zip(OPTIMIZERS, STEPS, strict=True)))
def test_every_optimizer_goes_where_a_plain_loop_goes(
    kind: Any, plain_step: Callable[[PlainProblem], None], restarts: bool
) -> None:
    gated = gated_mlp()
    budget = Budget(gated, params=0.5, restarts=restarts)
    problem = Problem(gated, budget)
    plain = PlainProblem(restarts)
    optimizer = optimizer_for(problem, kind, rates=plain.rates, plain=True)
    start = [p.detach().clone() for p in [*gated.weight_parameters(), gated.log_alpha]]
    history = []
    for _ in range(25):
        optimizer.roll()
        plain_step(plain)
        assert budget.multiplier.weight.item() == pytest.approx(plain.multipliers[0], rel=1e-4, abs=1e-5)
        assert problem.norm.multiplier.weight.item() == pytest.approx(plain.multipliers[1], rel=1e-4, abs=1e-5)
        history.append(plain.multipliers)
    mine, theirs = [*gated.weight_parameters(), gated.log_alpha], [*plain.weights, plain.log_alpha]
    for one, other, before in zip(mine, theirs, start, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(one, before, rtol=1e-3, atol=1e-3)
    assert params_of(gated) < 74
    assert max(first for first, _ in history) > 0.5
    assert max(second for _, second in history) > 0.1


def test_simultaneous_steps_are_those_of_pressure_and_step() -> None:
    """The same trajectory in a user's own loop, where the other constraint is written out."""
    gated, own = gated_mlp(), gated_mlp()
    problem = Problem(gated, Budget(gated, params=0.5))
    optimizer = optimizer_for(problem, SimultaneousOptimizer, rates=(0.4, 0.3), plain=True)
    budget = Budget(own, params=0.5, dual_rate=0.4)
    sgd = torch.optim.SGD(
        [{"params": own.weight_parameters(), "lr": 0.05}, {"params": own.gate_parameters(), "lr": 2.0}]
    )
    other = torch.zeros(())
    x, y = task()
    for step in range(25):
        problem.seed = step
        optimizer.roll()
        torch.manual_seed(step)
        violation = norm_of(own) / BOUND - 1
        loss = F.mse_loss(own(x), y) + budget.pressure() + other * violation
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        budget.step()
        other = (other + 0.3 * violation.detach()).relu()
        assert torch.allclose(budget.multiplier.weight, problem.of_prunus.multiplier.weight, rtol=1e-5, atol=1e-6)
        assert torch.allclose(other, problem.norm.multiplier.weight, rtol=1e-5, atol=1e-6)
    for one, two in zip(gated.parameters(), own.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)
    assert params_of(gated) == params_of(own) < 74


# ---- the augmented Lagrangian by itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplier", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("shift", [-2.0, 2.0])
def test_the_pressure_of_the_augmented_lagrangian_is_the_closed_form(multiplier: float, shift: float) -> None:
    """([lambda + c v]_+^2 - lambda^2) / 2c (Nocedal and Wright, 17.65), and its slope [lambda + c v]_+ dv."""
    gated = gated_mlp()
    with torch.no_grad():
        gated.log_alpha.add_(shift)
    c = 1.5
    penalty = DensePenaltyCoefficient(torch.tensor([c]))
    budget = Budget(gated, params=0.5, formulation=AugmentedLagrangian, penalty=penalty)
    plain = Budget(gated, params=0.5)
    with torch.no_grad():
        budget.multiplier.weight.fill_(multiplier)
        plain.multiplier.weight.fill_(1.0)
    violation = plain.state().violation.item()
    assert (violation > 0) is (shift > 0)
    lifted = max(0.0, multiplier + c * violation)
    value = budget.pressure()
    assert value.item() == pytest.approx((lifted**2 - multiplier**2) / (2 * c), rel=1e-4, abs=1e-6)
    (found,) = torch.autograd.grad(value, gated.log_alpha)
    (slope,) = torch.autograd.grad(plain.pressure(), gated.log_alpha)
    assert torch.allclose(found, lifted * slope, rtol=1e-4, atol=1e-7)
    budget.step()
    assert budget.multiplier.last is not None
    deployed = params_of(gated) / 37 - 1
    wanted = max(0.0, multiplier + 5e-3 * deployed) if deployed > 0 else 0.0
    assert budget.multiplier.weight.item() == pytest.approx(wanted, rel=1e-5, abs=1e-8)


def test_the_problem_knows_the_budgets_multiplier_and_saves_it() -> None:
    gated = gated_mlp()
    budget = Budget(gated, params=0.5, macs=0.5)
    problem = Problem(gated, budget)
    assert budget.constraint.constraint_type is ConstraintType.INEQUALITY
    assert dict(problem.named_multipliers())["size"] is budget.multiplier
    assert {id(p) for p in problem.dual_parameters()} == {
        id(budget.multiplier.weight), id(problem.norm.multiplier.weight)
    }  # fmt: skip
    with torch.no_grad():
        budget.multiplier.weight.copy_(torch.tensor([0.25, 4.0]))
    other = gated_mlp()
    again = Problem(other, Budget(other, params=0.5, macs=0.5))
    again.load_state_dict(problem.state_dict())
    assert again.of_prunus.multiplier.weight.tolist() == [0.25, 4.0]
