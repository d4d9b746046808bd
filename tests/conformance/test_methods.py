"""What every method must do on every problem, by the public interface alone.

A method joins by one more entry in `METHODS`, a problem by one more in `PROBLEMS`.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cooper.formulations import AugmentedLagrangian
from cooper.penalty_coefficients import DensePenaltyCoefficient
from torch import Tensor, nn
from torch.nn import functional as F

import prunus

STEPS = 90
BUDGETS = {"params": 0.4, "macs": "60%"}
WEIGHT_RATE, GATE_RATE, DUAL_RATE = 1e-2, 5e-2, 0.05


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- problems --------------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Two convolutions, a batch norm, and flattened features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 8, 3)
        self.fc1, self.fc2 = nn.Linear(32, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.norm(self.conv1(x)).relu()).relu()
        return self.fc2(self.fc1(x.flatten(1)).relu())


class ResidualNet(nn.Module):
    """A stream that a block reads and writes, batch norms in between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm1, self.norm2, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.stem(x)).relu()
        return self.head((x + self.b(self.norm2(self.a(x)).relu())).relu().mean((2, 3)))


def multilayer() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))


@dataclass(frozen=True)
class Problem:
    """Four noisy patterns to tell apart: linearly separable, so that a small part of the network can learn them."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def data(self, seed: int = 1) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        patterns = 1.5 * torch.randn(4, *self.shape, generator=generator)
        y = torch.arange(48) % 4
        noise = torch.randn(48, *self.shape, generator=torch.Generator().manual_seed(seed))
        return patterns[y] + 0.5 * noise, y


PROBLEMS = {
    "mlp": Problem(multilayer, (12,)),
    "convnet": Problem(ConvNet, (1, 6, 6)),
    "residual": Problem(ResidualNet, (1, 6, 6)),
}


# ---- methods ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """Constrained L0 in one of its variants, or penalised L0 with a landing on the budget."""

    gate: dict[str, Any] = field(default_factory=dict)
    budget: dict[str, Any] = field(default_factory=dict)
    penalty: str | None = None
    past: bool = False
    augmented: float | None = None

    def augmentation(self) -> dict[str, Any]:
        """Cooper's augmented Lagrangian, whose coefficient belongs to one training."""
        if self.augmented is None:
            return {}
        penalty = DensePenaltyCoefficient(torch.full((len(BUDGETS),), self.augmented))
        return {"formulation": AugmentedLagrangian, "penalty": penalty}

    def train(self, gated: prunus.Gated, x: Tensor, y: Tensor) -> prunus.Budget:
        """A loop as anybody writes it."""
        method: Any
        if self.penalty is None:
            method = prunus.Budget(gated, **BUDGETS, dual_rate=DUAL_RATE, **self.budget, **self.augmentation())
        else:
            method = prunus.Penalty(gated, self.penalty, examples=len(x))
        groups = [{"params": gated.weight_parameters()}, {"params": gated.gate_parameters(), "lr": GATE_RATE}]
        optimizer: torch.optim.Optimizer = torch.optim.Adam(groups, lr=WEIGHT_RATE)
        if self.past:
            optimizer = prunus.ExtrapolationFromThePast(optimizer)
        gated.train()
        for step in range(STEPS):
            if isinstance(method, prunus.Budget):
                method.tighten(step / (0.7 * STEPS))
            loss = F.cross_entropy(gated(x), y) + method.pressure()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            method.step()
        if isinstance(optimizer, prunus.ExtrapolationFromThePast):
            with optimizer.settled():
                reached = [p.detach().clone() for p in gated.parameters()]
            with torch.no_grad():
                for parameter, value in zip(gated.parameters(), reached, strict=True):
                    parameter.copy_(value)
        return method if isinstance(method, prunus.Budget) else prunus.Budget(gated, **BUDGETS)


METHODS = {
    "constrained": Method(),
    "expected dual": Method(budget={"dual": "expected"}),
    "no restarts": Method(budget={"restarts": False}),
    "past": Method(budget={"extrapolate": True}, past=True),
    "augmented": Method(augmented=0.5),
    "per example": Method(gate={"per_example": True}),
    "noiseless": Method(gate={"estimate": "noiseless"}),
    "groups": Method(gate={"units": "groups"}),
    "weights": Method(gate={"units": "weights"}),
    "blocks": Method(gate={"units": "2x3"}),
    "one of two": Method(gate={"units": "1:2"}),
    "round": Method(gate={"round_to": 2}),
    "penalised": Method(penalty="0.03/N"),
}
CASES = [(method, problem) for method in METHODS for problem in PROBLEMS]
every = pytest.mark.parametrize("method, problem", CASES)


def test_as_many_cases_are_tried_as_there_are() -> None:
    assert (len(METHODS), len(PROBLEMS), len(CASES)) == (13, 3, 39)


# ---- one training for all the tests of a case ------------------------------------------------------------------------


@dataclass
class Trained:
    """A trained gated model as training left it, and what came out of the shrinking."""

    gated: prunus.Gated
    budget: prunus.Budget
    losses: tuple[float, float]
    dense: dict[str, int]
    location: Tensor
    keys: list[tuple[str, tuple[int, ...]]]
    small: nn.Module
    receipt: prunus.Receipt
    landed: Tensor

    def back(self, landed: bool) -> prunus.Gated:
        """The gates as training left them, or as the landing did."""
        with torch.no_grad():
            self.gated.log_alpha.copy_(self.landed if landed else self.location)
        return self.gated.eval()


def fit(method: str, problem: str, seed: int) -> tuple[prunus.Gated, prunus.Budget, tuple[float, float]]:
    x, y = PROBLEMS[problem].data()
    torch.manual_seed(seed)
    gated = prunus.gate(PROBLEMS[problem].make(), x[:2], **METHODS[method].gate)
    before = loss_of(gated, x, y)
    budget = METHODS[method].train(gated, x, y)
    return gated, budget, (before, loss_of(gated, x, y))


@torch.no_grad()
def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return F.cross_entropy(model.eval()(x), y).item()


@cache
def trained(method: str, problem: str) -> Trained:
    x, _ = PROBLEMS[problem].data()
    gated, budget, losses = fit(method, problem, seed=0)
    location = gated.log_alpha.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a short training may leave the landing much to close
        small, receipt = prunus.shrink(gated, x[:2], batches=())
    keys = [(key, tuple(value.shape)) for key, value in gated.model.state_dict().items()]
    landed = gated.log_alpha.detach().clone()
    return Trained(gated, budget, losses, gated.cost.dense(), location, keys, small, receipt, landed)


def count(small: nn.Module, single_weights: set[str]) -> int:
    """Parameters of a network; where weights were removed one by one, those that are not zero."""
    return sum(
        int((value != 0).sum()) if name in single_weights else value.numel() for name, value in small.named_parameters()
    )


# ---- the suite -------------------------------------------------------------------------------------------------------


@every
def test_the_loss_goes_down(method: str, problem: str) -> None:
    before, after = trained(method, problem).losses
    assert math.isfinite(before)
    assert math.isfinite(after)
    assert after < 0.7 * before


@every
def test_training_itself_closes_units(method: str, problem: str) -> None:
    case = trained(method, problem)
    gated = case.back(landed=False)
    assert int(gated.open_units().sum()) < gated.units
    assert torch.isfinite(case.location).all()


@every
def test_the_deployed_cost_is_at_or_under_every_budget(method: str, problem: str) -> None:
    case = trained(method, problem)
    deployed, dense = case.receipt["deployed"], case.receipt["dense"]
    assert {what: dense[what] for what in case.dense if what != "bytes"} == {
        what: value for what, value in case.dense.items() if what != "bytes"
    }
    assert deployed["params"] <= 0.4 * dense["params"]
    assert deployed["macs"] <= 0.6 * dense["macs"]
    assert [line["what"] for line in case.receipt["budgets"]] == ["params", "macs"]
    assert all(line["met"] for line in case.receipt["budgets"])
    assert count(case.small, set(case.gated.graph.scattered)) <= deployed["params"]
    if not case.gated.graph.scattered:
        assert count(case.small, set()) == deployed["params"]


@every
def test_the_shrunk_model_equals_the_gated_one(method: str, problem: str) -> None:
    case = trained(method, problem)
    gated, small = case.back(landed=True), case.small.eval()
    assert case.receipt["exactness"]["ok"]
    inputs = [PROBLEMS[problem].data(seed)[0] for seed in (11, 12)]
    inputs += [3 * torch.randn(7, *PROBLEMS[problem].shape, generator=torch.Generator().manual_seed(13))]
    with torch.no_grad():
        for x in inputs:
            wanted, found = gated(x), small(x)
            assert wanted.shape == found.shape == (len(x), 4)
            assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        ungated = gated.model(inputs[0])
        assert (ungated - gated(inputs[0])).abs().max() > 1e-3 * ungated.abs().max()  # the gates do matter


@every
def test_the_shrunk_model_still_solves_the_problem(method: str, problem: str) -> None:
    case = trained(method, problem)
    x, y = PROBLEMS[problem].data(seed=21)
    with torch.no_grad():
        right = (case.small.eval()(x).argmax(1) == y).float().mean().item()
    assert right > 0.5


@every
def test_the_keys_of_the_users_model_stay(method: str, problem: str) -> None:
    fresh = PROBLEMS[problem].make()
    assert trained(method, problem).keys == [(key, tuple(value.shape)) for key, value in fresh.state_dict().items()]
    assert list(trained(method, problem).small.state_dict()) == list(fresh.state_dict())


@every
def test_what_is_saved_loads_onto_a_fresh_model(method: str, problem: str, tmp_path: Path) -> None:
    case = trained(method, problem)
    prunus.save(case.small, tmp_path / "small.safetensors")
    torch.manual_seed(99)
    loaded = prunus.load(PROBLEMS[problem].make(), tmp_path / "small.safetensors").eval()
    x, _ = PROBLEMS[problem].data(seed=31)
    with torch.no_grad():
        assert torch.equal(loaded(x), case.small.eval()(x))
    assert count(loaded, set()) == count(case.small, set())


@every
def test_the_same_seed_gives_the_same_network(method: str, problem: str) -> None:
    case = trained(method, problem)
    again, _, losses = fit(method, problem, seed=0)
    assert losses == case.losses
    assert torch.equal(again.log_alpha, case.location)
    assert all(
        torch.equal(a, b) for a, b in zip(again.weight_parameters(), case.gated.weight_parameters(), strict=True)
    )


@every
def test_a_smaller_budget_never_gives_a_bigger_network(method: str, problem: str) -> None:
    case = trained(method, problem)
    for what in ("params", "macs"):
        trained_size = case.back(landed=False).deployed()[what]
        least = round(prunus.Budget(case.gated, **{what: trained_size}).reach[0])
        assert least < trained_size < case.dense[what]
        sizes = []
        for part in (1.0, 0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.0):
            limit = round(least + part * (trained_size - least))
            gated = case.back(landed=False)
            budget = prunus.Budget(gated, **{what: limit})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                prunus.land(gated, budget)
            sizes.append(gated.deployed()[what])
            assert sizes[-1] <= limit
        assert sizes == sorted(sizes, reverse=True)
        assert (sizes[0], sizes[-1]) == (trained_size, least)
    case.gated.budget = case.budget


def test_another_seed_gives_another_network() -> None:
    """What says that the same seed is the same network can fail."""
    case = trained("constrained", "mlp")
    other, _, _ = fit("constrained", "mlp", seed=1)
    assert not torch.equal(other.log_alpha, case.location)
