"""Budgets against slow loops, sums over all gate states, counts by hand, and what is counted on sliced modules."""

import itertools
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from budget_models import INPUTS, MAKE, by_group, counted, slow_params, small_gated
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import prunus
from prunus.budget import Budget, BudgetMultiplier, parse
from prunus.errors import BudgetError
from prunus.gated import Gated

MEASURES = ("params", "macs", "bytes")
GATED: dict[tuple[str, str], Gated] = {}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gated_again(name: str, seed: int = 0, units: str = "structured", spread: float = 1.5) -> Gated:
    """A gated model, analysed once a test run, with its gates put anywhere."""
    if (name, units) not in GATED:
        GATED[name, units] = small_gated(name, units=units)
    one = GATED[name, units]
    one._mask, one._noisy, one.landing = None, True, None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        drawn = -1.0 + spread * torch.randn(one.units, generator=generator)
        one.log_alpha.copy_(drawn.clamp_(one.gates.low, one.gates.high))
    one.log_alpha.grad = None
    one.log_alpha.requires_grad_(True)
    return one


def hand(name: str, n: Any, square: Any = None) -> dict[str, Any]:
    """Parameters, MACs and bytes written down by hand, of the two models whose gates can all be enumerated."""
    if name == "mlp":
        i, a, b = n
        params, macs = i * a + a + a * b + b + 3 * b + 3, i * a + a * b + 3 * b
    else:
        i, s, u = n
        square = s * s if square is None else square
        params, macs = i * s + s + u * s + u + s * u + s + square + 3 * s + 3, i * s + 2 * u * s + square + 3 * s
    return {"params": params, "macs": macs, "bytes": 4 * params}


def probabilities(one: Gated) -> Tensor:
    """P(z != 0) of every gate, from the papers' formula in float64."""
    location = 2 / 3 * math.log(0.1 / 1.1)
    return torch.tensor([1 / (1 + math.exp(location - a)) for a in one.log_alpha.tolist()], dtype=torch.float64)


def enumerated(name: str, p: Tensor, sizes: list[int]) -> dict[str, float]:
    """The mean of the counts by hand over all 0/1 states of all gates."""
    states = torch.tensor(list(itertools.product([0.0, 1.0], repeat=len(p))), dtype=torch.float64)
    chances = torch.where(states == 1, p, 1 - p).prod(-1)
    counts = [part.sum(-1) for part in states.split(sizes, dim=-1)]
    return {what: float((chances * value).sum()) for what, value in hand(name, counts).items()}


def lenet_in_closed_form(one: Gated, p: Tensor) -> float:
    """Its expected parameters: the 16 features nest under the four maps, four by four."""
    conv1, conv2, fine, fc1 = (torch.tensor(part, dtype=torch.float64) for part in by_group(one, p).values())
    read = (conv2.repeat_interleave(4) * fine).sum()
    a, b, f = conv1.sum(), conv2.sum(), fc1.sum()
    return float(9 * a + a + 4 * a * b + b + read * f + f + 3 * f + 3)


# ---- violations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MAKE)
def test_the_expected_violation_is_that_of_the_slow_loop(name: str, seed: int) -> None:
    one = gated_again(name, seed)
    budget = Budget(one, params=0.5)
    wanted = slow_params(one, by_group(one, probabilities(one))) / (0.5 * one.cost.dense()["params"]) - 1
    assert abs(wanted) > 1e-3
    assert budget.state().violation.tolist() == pytest.approx([wanted], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_the_expected_violations_are_the_means_over_all_states(name: str, seed: int) -> None:
    one = gated_again(name, seed)
    budget = Budget(one, params=0.5, macs=0.4, bytes=250)
    mean = enumerated(name, probabilities(one), list(one.graph.sizes.values()))
    dense = hand(name, list(one.graph.sizes.values()))
    assert dense == one.cost.dense()
    limits = {"params": 0.5 * dense["params"], "macs": 0.4 * dense["macs"], "bytes": 250}
    wanted = [mean[what] / limits[what] - 1 for what in MEASURES]
    assert budget.state().violation.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert [reading["expected"] for reading in budget.readings()] == pytest.approx(
        [mean[w] for w in MEASURES], rel=1e-6
    )


@pytest.mark.parametrize("seed", range(2))
def test_the_expected_violation_of_nested_features_is_the_closed_form(seed: int) -> None:
    one = gated_again("lenet", seed)
    wanted = lenet_in_closed_form(one, probabilities(one)) / 60 - 1
    assert Budget(one, params=60).state().violation.item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("units", ["structured", "groups"])
@pytest.mark.parametrize("name", MAKE)
def test_the_deployed_violation_is_what_is_counted_on_the_sliced_module(name: str, units: str, seed: int) -> None:
    one = gated_again(name, seed, units, spread=2.5)
    budget = Budget(one, params=0.5, macs=0.6, bytes=0.7)
    dense, found = one.cost.dense(), counted(one, one.keep(), INPUTS[name]())
    wanted = [found[what] / (share * dense[what]) - 1 for what, share in zip(MEASURES, (0.5, 0.6, 0.7), strict=True)]
    strict = budget.state().strict_violation
    assert strict is not None
    assert strict.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert not strict.requires_grad
    assert [reading["deployed"] for reading in budget.readings()] == [found[what] for what in MEASURES]


@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_a_group_with_all_its_gates_closed_counts_one_unit(name: str) -> None:
    one = gated_again(name)
    with torch.no_grad():
        one.log_alpha.fill_(-4.0)
        one.log_alpha[-2:] = 3.0
    budget = Budget(one, params=0.9, macs=0.9)
    wanted = hand(name, (1, 1, 2))
    strict = budget.state().strict_violation
    assert strict is not None
    assert ((strict.double() + 1) * budget.limits).tolist() == pytest.approx(
        [wanted["params"], wanted["macs"]], rel=1e-5
    )


@pytest.mark.parametrize("name", MAKE)
def test_state_and_pressure_see_the_same_violations(name: str) -> None:
    one = gated_again(name, 5)
    budget = Budget(one, params=0.5, macs=0.4)
    state = budget.state()
    with torch.no_grad():
        budget.multiplier.weight.copy_(torch.tensor([0.7, 2.0]))
    value = budget.pressure()
    assert value.item() == pytest.approx(0.7 * state.violation[0].item() + 2.0 * state.violation[1].item(), rel=1e-5)
    assert budget.multiplier.last is not None
    assert torch.equal(budget.multiplier.last, state.strict_violation)


# ---- the pressure's gradient -----------------------------------------------------------------------------------------


def gradient_of(budget: Budget, multipliers: list[float]) -> Tensor:
    with torch.no_grad():
        budget.multiplier.weight.copy_(torch.tensor(multipliers))
    budget.gated.log_alpha.grad = None
    budget.pressure().backward()
    found = budget.gated.log_alpha.grad
    assert found is not None
    return found.double()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_the_gradient_is_that_of_the_formula_by_hand(name: str, seed: int) -> None:
    one = gated_again(name, seed)
    budget = Budget(one, params=0.5, macs=0.3)
    at = one.log_alpha.detach().double().requires_grad_()
    p = torch.sigmoid(at - 2 / 3 * math.log(0.1 / 1.1))
    parts = p.split(list(one.graph.sizes.values()))
    counts = [part.sum() for part in parts]
    squared = counts[1] ** 2 + (parts[1] * (1 - parts[1])).sum()
    cost = hand(name, counts, squared)
    dense = one.cost.dense()
    total = 0.7 * (cost["params"] / (0.5 * dense["params"]) - 1) + 1.9 * (cost["macs"] / (0.3 * dense["macs"]) - 1)
    (wanted,) = torch.autograd.grad(total, at)
    assert torch.allclose(gradient_of(budget, [0.7, 1.9]), wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", MAKE)
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    """Central differences of the slow loop in float64, at a few gates of every group."""
    one = gated_again(name, 3)
    budget = Budget(one, params=0.4)
    found = gradient_of(budget, [1.3])
    where = [start + k for g, start in one.cost.offsets.items() for k in {0, one.graph.sizes[g] - 1}]
    location, step = one.log_alpha.detach().double(), 1e-4

    def value(at: Tensor) -> float:
        p = torch.sigmoid(at - 2 / 3 * math.log(0.1 / 1.1))
        return 1.3 * (slow_params(one, by_group(one, p)) / (0.4 * one.cost.dense()["params"]) - 1)

    for k in where:
        ahead, behind = location.clone(), location.clone()
        ahead[k] += step
        behind[k] -= step
        assert found[k].item() == pytest.approx((value(ahead) - value(behind)) / (2 * step), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", MAKE)
def test_pressure_and_state_give_one_gradient(name: str) -> None:
    one = gated_again(name, 4)
    budget = Budget(one, params=0.4, macs=0.5, density=0.6)
    written_out = gradient_of(budget, [1.3, 0.0, 0.4])
    one.log_alpha.grad = None
    (budget.state().violation * budget.multiplier.weight.detach()).sum().backward()
    assert one.log_alpha.grad is not None
    assert torch.allclose(one.log_alpha.grad.double(), written_out, rtol=1e-5, atol=1e-9)
    assert written_out.abs().min() > 0


def test_the_gradient_scales_with_what_comes_from_above() -> None:
    one = gated_again("residual", 4)
    budget = Budget(one, params=0.4)
    plain = gradient_of(budget, [1.3])
    one.log_alpha.grad = None
    (-2.5 * budget.pressure()).backward()
    assert torch.allclose(one.log_alpha.grad.double(), -2.5 * plain)


def test_a_model_in_double_precision_has_the_same_pressure() -> None:
    values = []
    for dtype in (torch.float32, torch.float64):
        one = small_gated("lenet", seed=3).to(dtype)
        assert one.log_alpha.dtype == dtype
        budget = Budget(one, params=0.4)
        values.append(gradient_of(budget, [1.3]))
        assert one.log_alpha.grad.dtype == dtype
    assert torch.allclose(*values, rtol=1e-5)


# ---- the multipliers -------------------------------------------------------------------------------------------------


def plain_dual(multipliers: list[float], violations: list[float], rate: float, restarts: bool) -> list[float]:
    """Eq. 7 of constrained L0 with dual restarts, in plain Python."""
    result = []
    for multiplier, violation in zip(multipliers, violations, strict=True):
        moved = max(0.0, multiplier + rate * violation)
        if restarts and violation <= 0:
            moved = 0.0
        result.append(moved)
    return result


NUMBERS = st.floats(-3, 3, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30)


@given(
    st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1, max_size=8)),
    st.floats(1e-3, 2),
    st.booleans(),
)
@example([[1.0, -1.0], [0.0, 0.5], [-0.1, 0.5]], 0.5, True)
@example([[1.0, -1.0], [0.0, 0.5], [-0.1, 0.5]], 0.5, False)
@settings(max_examples=80, deadline=None)
def test_the_multipliers_follow_a_plain_loop(rows: list[list[float]], rate: float, restarts: bool) -> None:
    multiplier = BudgetMultiplier(len(rows[0]), restarts)
    address, plain = multiplier.weight.data_ptr(), [0.0] * len(rows[0])
    for row in rows:
        multiplier.last = torch.tensor(row)
        multiplier.ascend_(multiplier.last, rate)
        plain = plain_dual(plain, row, rate, restarts)
        assert multiplier.weight.tolist() == pytest.approx(plain, rel=1e-5, abs=1e-6)
        assert (multiplier.weight >= 0).all()
    assert multiplier.weight.data_ptr() == address
    assert multiplier.weight.dtype == torch.float32
    assert multiplier.weight.shape == (len(rows[0]),)


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("dual", ["deployed", "expected"])
def test_steps_of_a_budget_follow_a_plain_loop(dual: str, restarts: bool) -> None:
    """The gates wander, so that lines are missed, met and missed again; the loop counts sliced modules by itself."""
    one = gated_again("residual")
    budget = Budget(one, params=0.5, macs=0.5, dual_rate=0.3, dual=dual, restarts=restarts)
    parameter, address = budget.multiplier.weight, budget.multiplier.weight.data_ptr()
    dense, plain, seen = one.cost.dense(), [0.0, 0.0], []
    for step in range(14):
        with torch.no_grad():
            one.log_alpha.copy_(-1.6 + 1.5 * math.cos(0.6 * step) + torch.linspace(-1, 1, one.units))
        budget.pressure()
        if dual == "deployed":
            cost: Any = counted(one, one.keep(), INPUTS["residual"]())
        else:
            cost = enumerated("residual", probabilities(one), list(one.graph.sizes.values()))
        violations = [cost["params"] / (0.5 * dense["params"]) - 1, cost["macs"] / (0.5 * dense["macs"]) - 1]
        budget.step()
        plain = plain_dual(plain, violations, 0.3, restarts)
        seen.append(violations[0] > 0)
        assert budget.multiplier.weight.tolist() == pytest.approx(plain, rel=1e-4, abs=1e-5)
    assert sum(before != after for before, after in itertools.pairwise(seen)) >= 2
    assert budget.multiplier.weight is parameter
    assert budget.multiplier.weight.data_ptr() == address


def test_the_multipliers_follow_the_cost_they_are_told_to() -> None:
    """All gates a little closed: the deployed network is the least one, the expected one is not."""
    one = gated_again("mlp")
    found = {}
    for dual in ("deployed", "expected"):
        with torch.no_grad():
            one.log_alpha.fill_(one.threshold - 0.1)
        budget = Budget(one, params=0.2, dual=dual, dual_rate=0.5)
        state = budget.state()
        assert state.violation.item() > 0
        budget.step()
        found[dual] = (budget.multiplier.weight.item(), state)
    assert found["deployed"][0] == 0
    assert found["deployed"][1].strict_violation.item() == pytest.approx(10 / (0.2 * 74) - 1, rel=1e-5)
    assert found["expected"][0] == pytest.approx(0.5 * found["expected"][1].violation.item(), rel=1e-6)
    assert torch.equal(found["expected"][1].strict_violation, found["expected"][1].violation.detach())


def test_without_restarts_a_met_budget_lets_go_slowly() -> None:
    weights = {}
    for restarts in (True, False):
        one = gated_again("mlp")
        budget = Budget(one, params=0.5, dual_rate=0.1, restarts=restarts)
        with torch.no_grad():
            budget.multiplier.weight.fill_(1.0)
            one.log_alpha.fill_(-4.0)
        budget.step()
        weights[restarts] = budget.multiplier.weight.item()
    assert weights[True] == 0
    assert weights[False] == pytest.approx(1 + 0.1 * (10 / 37 - 1), rel=1e-5)


def test_a_step_uses_the_violation_that_the_last_pressure_saw() -> None:
    one = gated_again("mlp")
    budget = Budget(one, params=0.5, dual_rate=0.25)
    with torch.no_grad():
        one.log_alpha.fill_(4.0)
    budget.pressure()
    with torch.no_grad():
        one.log_alpha.fill_(-4.0)  # what the optimizer did since
    budget.step()
    assert budget.multiplier.weight.item() == pytest.approx(0.25 * (74 / 37 - 1), rel=1e-6)
    budget.step()  # nothing was seen since: it looks for itself, and the budget is met
    assert budget.multiplier.weight.item() == 0


def test_extrapolation_looks_one_dual_step_ahead() -> None:
    one = gated_again("residual", 1)
    budget = Budget(one, params=0.5, macs=0.9, dual_rate=0.2, extrapolate=True, restarts=False)
    plain: list[float] = [0.3, 0.05]
    with torch.no_grad():
        budget.multiplier.weight.copy_(torch.tensor(plain))
    previous: list[float] | None = None
    clipped = 0
    for step in range(6):
        with torch.no_grad():
            one.log_alpha.copy_(-1.5 + 1.5 * math.cos(1.1 * step) + torch.linspace(-1, 1, one.units))
        cost = enumerated("residual", probabilities(one), list(one.graph.sizes.values()))
        expected = [cost["params"] / (0.5 * 127) - 1, cost["macs"] / (0.9 * 110) - 1]
        ahead = plain
        if previous is not None:
            ahead = [max(0.0, m + 0.2 * v) for m, v in zip(plain, previous, strict=True)]
            clipped += sum(m + 0.2 * v < 0 for m, v in zip(plain, previous, strict=True))
        wanted = sum(m * v for m, v in zip(ahead, expected, strict=True))
        assert budget.pressure().item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        deployed = counted(one, one.keep(), INPUTS["residual"]())
        previous = [deployed["params"] / (0.5 * 127) - 1, deployed["macs"] / (0.9 * 110) - 1]
        budget.step()
        plain = plain_dual(plain, previous, 0.2, restarts=False)
        assert budget.multiplier.weight.tolist() == pytest.approx(plain, rel=1e-4, abs=1e-6)
    assert clipped > 0


def test_the_state_comes_back_and_goes_on_the_same() -> None:
    one = gated_again("lenet", 1)
    with torch.no_grad():
        one.log_alpha.add_(3.0)
    options = {"params": 0.3, "macs": 0.5, "dual_rate": 0.1, "extrapolate": True}
    first, second = Budget(one, **options), Budget(one, **options)
    assert set(first.state_dict()) == {"multiplier"}
    for _ in range(3):
        first.pressure()
        first.step()
    saved = first.state_dict()
    assert set(saved) == {"multiplier", "previous"}
    first.pressure()
    first.step()
    assert (saved["multiplier"] < first.multiplier.weight).all()  # what was saved is a copy
    address = second.multiplier.weight.data_ptr()
    second.load_state_dict(saved)
    assert second.multiplier.weight.data_ptr() == address
    second.pressure()
    second.step()
    assert torch.equal(second.multiplier.weight, first.multiplier.weight)
    assert torch.equal(second.pressure(), first.pressure())
    second.load_state_dict({"multiplier": torch.zeros(2)})
    assert second.pressure().item() == 0  # and nothing is left to extrapolate from


# ---- limits that tighten ---------------------------------------------------------------------------------------------


def test_limits_fall_geometrically_from_the_dense_cost() -> None:
    one = gated_again("mlp", 2)
    budget = Budget(one, params=0.2, macs=20)
    assert torch.equal(budget.now, budget.limits)
    for progress in (0.0, 0.25, 0.5, 0.9, 1.0):
        budget.tighten(progress)
        wanted = [74 * (0.2**progress), 62 * ((20 / 62) ** progress)]
        assert budget.now.tolist() == pytest.approx(wanted, rel=1e-12)
    assert torch.equal(budget.now, budget.limits)


def test_progress_beyond_its_ends_changes_nothing() -> None:
    budget = Budget(gated_again("mlp"), params=0.2)
    budget.tighten(-3.0)
    assert budget.now.tolist() == [74.0]
    budget.tighten(7.0)
    assert torch.equal(budget.now, budget.limits)


def test_a_limit_above_the_dense_cost_tightens_nothing() -> None:
    with pytest.warns(UserWarning, match="does nothing"):
        budget = Budget(gated_again("mlp"), params=100, macs=0.5)
    for progress in (0.0, 0.3, 0.99):
        budget.tighten(progress)
        assert budget.now[0].item() == pytest.approx(74, rel=1e-12)


def test_violations_are_relative_to_the_limit_of_the_moment() -> None:
    one = gated_again("mlp", 2)
    budget = Budget(one, params=0.2)
    with torch.no_grad():
        one.log_alpha.fill_(4.0)
        budget.multiplier.weight.fill_(1.0)
    found = []
    for progress in (0.0, 0.5, 1.0):
        budget.tighten(progress)
        state = budget.state()
        assert budget.pressure().item() == pytest.approx(state.violation.item(), rel=1e-5)
        found.append(state.strict_violation.item())
    assert found == pytest.approx([0.0, 5**0.5 - 1, 4.0], rel=1e-5, abs=1e-6)
    budget.tighten(0.0)
    assert budget.readings()[0]["limit"] == pytest.approx(14.8)  # what was asked for stays what is asked for
    assert not budget.met()


# ---- several lines, layers, density ----------------------------------------------------------------------------------


def test_every_line_is_read_as_if_it_were_alone() -> None:
    one = gated_again("residual", 6)
    texts = ["params=50%", "macs=40%", "bytes=300B", "density=60%", "layer:mix=50%", "layer:*p:macs=9", "layer:up=10"]
    together = Budget(one, lines=parse(texts)).state()
    assert together.violation.shape == (7,)
    for k, text in enumerate(texts):
        alone = Budget(one, lines=parse([text])).state()
        assert together.violation[k].item() == pytest.approx(alone.violation.item(), rel=1e-6)
        assert together.strict_violation[k].item() == pytest.approx(alone.strict_violation.item(), rel=1e-6)
    assert len({round(v, 6) for v in together.violation.tolist()}) == 7


@pytest.mark.parametrize("seed", range(2))
def test_lines_of_layers_count_their_layers(seed: int) -> None:
    one = gated_again("residual", seed)
    budget = Budget(one, layers={"mix": 0.5, "up": {"params": 10, "macs": 0.5}, "[us]*": 0.5})
    p = probabilities(one)
    i, s, u = p.split(list(one.graph.sizes.values()))
    mix = float(s.sum() ** 2 + (s * (1 - s)).sum())
    up = float(u.sum() * s.sum())
    stem = float(i.sum() * s.sum() + s.sum())
    wanted = [mix / 12.5 - 1, (up + u.sum().item()) / 10 - 1, up / 10 - 1, (up + u.sum().item() + stem) / 29.5 - 1]
    assert budget.state().violation.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    slow = [slow_params(one, by_group(one, p), layer) for layer in ("mix", "up")]
    assert slow == pytest.approx([mix, up + u.sum().item()], rel=1e-9)
    assert [reading["where"] for reading in budget.readings()] == ["mix", "up", "up", "[us]*"]


OWNED: dict[str, dict[str, tuple[str, int]]] = {
    "lenet": {"conv1": ("conv1", 9), "conv2": ("conv2", 12), "fc1": ("fc1.inputs", 5), "fc2": ("fc1", 3)},
    "residual": {"stem": ("stem.inputs", 5), "up": ("stem", 4), "down": ("up", 5), "mix": ("stem", 5),
                 "out": ("stem", 3)},
    "mlp": {"0": ("0.inputs", 5), "2": ("0", 4), "4": ("2", 3)},
    "branches": {"a": ("a", 9), "b": ("b", 9), "fc": ("fc.inputs", 4), "out": ("fc", 2)},
}  # fmt: skip


def density_by_hand(one: Gated, name: str, share: Tensor, layers: list[str]) -> float:
    """The papers' counting: a convolution's weights belong to its maps, a linear layer's to its inputs."""
    values = by_group(one, share)
    total = part = 0.0
    for layer in layers:
        group, numbers = OWNED[name][layer]
        total += numbers * len(values[group])
        part += numbers * sum(values[group])
    return part / total


@pytest.mark.parametrize("name", MAKE)
def test_density_is_the_papers_one_sided_count(name: str) -> None:
    one = gated_again(name, 8)
    layers = list(OWNED[name])
    budget = Budget(one, density={"*": 0.5, **dict.fromkeys(layers, 0.6)})
    p, open_ = probabilities(one), one.open_units()
    asked = [layers, *([layer] for layer in layers)]
    limits = [0.5, *[0.6] * len(layers)]
    state = budget.state()
    for k, (chosen, limit) in enumerate(zip(asked, limits, strict=True)):
        wanted = density_by_hand(one, name, p, chosen)
        assert state.violation[k].item() == pytest.approx(wanted / limit - 1, rel=1e-5, abs=1e-6)
        deployed = density_by_hand(one, name, open_, chosen)
        assert state.strict_violation[k].item() == pytest.approx(deployed / limit - 1, rel=1e-5, abs=1e-6)
        reading = budget.readings()[k]
        assert (reading["expected"], reading["paper"]) == pytest.approx((wanted, wanted), rel=1e-5)
        assert reading["deployed"] == pytest.approx(deployed, rel=1e-9)
        assert reading["dense"] == pytest.approx(1)
    whole = Budget(one, density="50%")
    assert whole.state().violation[0].item() == pytest.approx(state.violation[0].item(), rel=1e-6)


def test_density_of_single_weights_is_their_share() -> None:
    one = gated_again("mlp", 2, "weights")
    budget = Budget(one, density=0.5)
    p, open_ = probabilities(one), one.open_units()
    assert one.units == 62
    assert budget.readings()[0]["expected"] == pytest.approx(p.mean().item(), rel=1e-6)
    assert budget.readings()[0]["deployed"] == pytest.approx(open_.mean().item())


def test_readings_say_everything_of_every_line() -> None:
    one = gated_again("mlp", 2)
    budget = Budget(one, params=0.5, layers={"2": {"macs": 10}})
    with torch.no_grad():
        budget.multiplier.weight.copy_(torch.tensor([0.5, 0.25]))
    found = counted(one, one.keep(), INPUTS["mlp"]())
    p = probabilities(one)
    i, a, b = (part.sum().item() for part in p.split([6, 5, 4]))
    _, a_open, b_open = (int(part.sum()) for part in one.open_units().split([6, 5, 4]))
    first, second = budget.readings()
    assert first == {
        "what": "params", "where": None, "limit": 37.0, "dense": 74.0, "multiplier": 0.5, "deployed": found["params"],
        "expected": pytest.approx(hand("mlp", (i, a, b))["params"], rel=1e-6),
        "paper": pytest.approx(density_by_hand(one, "mlp", p, ["0", "2", "4"]), rel=1e-6),
        "met": found["params"] <= 37,
    }  # fmt: skip
    assert second == {
        "what": "macs", "where": "2", "limit": 10.0, "dense": 20.0, "multiplier": 0.25, "deployed": a_open * b_open,
        "expected": pytest.approx(a * b, rel=1e-6), "paper": pytest.approx(a / 5, rel=1e-6),
        "met": a_open * b_open <= 10,
    }  # fmt: skip


@pytest.mark.parametrize("limit, met", [(47, True), (46, False), (0.635, False), (0.6352, True)])
def test_a_budget_is_met_at_its_limit_and_not_above(limit: float, met: bool) -> None:
    """Inputs, neurons, neurons: 4, 4, 3 make 47 parameters, 63.51% of 74."""
    one = gated_again("mlp")
    opened = torch.tensor([True] * 4 + [False] * 2 + [True] * 4 + [False] + [True] * 3 + [False])
    with torch.no_grad():
        one.log_alpha.copy_(torch.where(opened, 3.0, -3.0))
    assert one.deployed()["params"] == hand("mlp", (4, 4, 3))["params"] == 47
    assert Budget(one, params=limit).met() is met


# ---- what cannot be ----------------------------------------------------------------------------------------------


def least_named(said: str) -> int:
    found = re.search(r"the least possible is ([\d,]+) ", said)
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_the_least_possible_is_the_least_of_all_states(name: str) -> None:
    one = gated_again(name)
    sizes = list(one.graph.sizes.values())
    every = [hand(name, n) for n in itertools.product(*(range(1, size + 1) for size in sizes))]
    for what in MEASURES:
        with pytest.raises(BudgetError) as caught:
            Budget(one, **{what: 1})
        assert least_named(str(caught.value)) == min(cost[what] for cost in every) == hand(name, (1, 1, 1))[what]


@given(
    st.sampled_from([(name, units) for name in MAKE for units in ("structured", "groups", "weights")]),
    st.sampled_from(["params", "macs", "bytes", "layer"]),
    st.integers(0, 10_000),
)
@example(("residual", "structured"), "macs", 0)
@example(("branches", "structured"), "params", 1)
@settings(max_examples=40, deadline=None)
def test_what_is_said_to_be_possible_is_accepted_and_met(which: tuple[str, str], what: str, seed: int) -> None:
    name, units = which
    one = gated_again(name, seed, units, spread=2.5)
    line = f"layer:{list(OWNED[name])[1]}" if what == "layer" else what
    with pytest.raises(BudgetError) as caught:
        Budget(one, lines=parse([f"{line}=1" if what != "layer" else f"{line}=0.001%"]))
    least = least_named(str(caught.value))
    with pytest.raises(BudgetError, match="cannot be reached"):
        Budget(one, lines=parse([f"{line}={least - 1}"]))
    budget = Budget(one, lines=parse([f"{line}={least}"]))
    over = budget.readings()[0]["deployed"] - least
    with warnings.catch_warnings(record=True) as caught_:
        warnings.simplefilter("always")
        done = prunus.land(one)
    assert done.closed > 0 or over == 0
    assert [str(warning.message).split(",")[0] for warning in caught_] == (
        [str(done.advice).split(",")[0]] if over > 0.02 * least else []
    )
    assert budget.met()
    assert budget.readings()[0]["deployed"] == least
    if units != "weights" and what != "layer":
        assert counted(one, one.keep(), INPUTS[name]())[what] == least


def test_all_the_least_at_once_are_met() -> None:
    one = gated_again("lenet", 3)
    texts = []
    for name in ("params", "macs", "bytes", "layer:conv2", "layer:fc1:macs"):
        with pytest.raises(BudgetError) as caught:
            Budget(one, lines=parse([f"{name}=0.01%"]))
        texts.append(f"{name}={least_named(str(caught.value))}")
    budget = Budget(one, lines=parse(texts))
    with pytest.warns(UserWarning, match="The landing had to close"):
        prunus.land(one)
    assert budget.met()
    assert one.keep().kept().keys() == one.graph.sizes.keys()
    assert all(len(kept) == 1 for kept in one.keep().kept().values())


def test_the_line_that_cannot_be_met_is_named() -> None:
    one = gated_again("mlp")
    for options, sentence in (
        ({"params": 0.5, "macs": 4}, "The budget macs=4 cannot be reached: it allows 4 MACs, and the least possible is "
                                     "5 MACs (8.06% of the dense model's 62 MACs), with one unit left in every group."),
        ({"params": 0.5, "bytes": "39B"}, "The budget bytes=39 cannot be reached: it allows 39 bytes, and the least "
                                          "possible is 40 bytes (13.51% of the dense model's 296 bytes)"),
        ({"params": 0.5, "layers": {"4": 0.3}}, "The budget layer:4=30% cannot be reached: it allows 4 parameters, and "
                                                "the least possible is 6 parameters (40.00% of the dense model's "),
        ({"params": 0.5, "density": 0.1}, "The budget density=10% cannot be reached: it allows 10.00%, and the least "
                                          "possible is 19.35%"),
    ):  # fmt: skip
        with pytest.raises(BudgetError, match=re.escape(sentence)):
            Budget(one, **options)


def test_an_expected_cost_cannot_fall_below_its_floor() -> None:
    one = gated_again("mlp")
    p = 1 / (1 + math.exp(2 / 3 * math.log(0.1 / 1.1) + math.log(100)))
    floor = hand("mlp", (6 * p, 5 * p, 4 * p))["params"]
    assert floor < 10  # fewer than a unit in every group: the deployed cost binds first
    with pytest.raises(BudgetError, match="the least possible is 10 parameters"):
        Budget(one, params=9, dual="expected")
    single = gated_again("lenet", units="weights")
    assert 4 + 15 < 22 < 170 * p + 15 < 24  # a weight in every layer, and all the biases
    with pytest.raises(BudgetError, match=r"params=22 cannot be reached by the expected cost.*; use dual='deployed'"):
        Budget(single, params=22, dual="expected")
    assert Budget(single, params=24, dual="expected").limits.tolist() == [24]
    assert Budget(single, params=22).limits.tolist() == [22]


def test_a_layer_without_anything_to_spend_is_refused() -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.conv(x)).mean((2, 3)))

    one = prunus.gate(Normed(), torch.randn(2, 1, 5, 5))
    assert Budget(one, layers={"norm": 0.5}).limits.tolist() == [4]
    for what in ("macs", "density"):
        with pytest.raises(
            BudgetError, match=f"layer:norm:{what}=50% counts nothing: there is no {what} in it to spend"
        ):
            Budget(one, layers={"norm": {what: 0.5}})


def without_budget(name: str) -> Gated:
    one = gated_again(name)
    one.budget = None
    return one


@pytest.mark.parametrize("options", [{"params": 1.0}, {"params": 74}, {"macs": 62}, {"params": "1k"}, {"density": 1.0}])
def test_a_budget_that_does_nothing_warns(options: dict[str, Any]) -> None:
    fresh = without_budget("mlp")
    with pytest.warns(UserWarning, match=r"allows what the dense model costs, .*: it does nothing") as caught:
        budget = Budget(fresh, **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__  # it speaks of the user's line
    with torch.no_grad():
        budget.gated.log_alpha.fill_(4.0)
    assert budget.met()
    assert budget.state().strict_violation.item() <= 1e-6


def test_just_below_the_dense_cost_nothing_warns(recwarn: pytest.WarningsRecorder) -> None:
    Budget(without_budget("mlp"), params=73, macs=0.999)
    assert not list(recwarn)


def test_a_second_budget_says_that_it_takes_the_firsts_place() -> None:
    first = Budget(without_budget("mlp"), params=0.5)
    with pytest.warns(UserWarning, match=r"has a budget already \(params=50%\): the new one takes its place"):
        second = Budget(first.gated, macs=0.5)
    assert first.gated.budget is second


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"dual": "both"}, "dual='both': the multipliers can watch the 'deployed' or the 'expected' cost"),
        ({"dual_rate": 0}, "dual_rate=0 must be above zero"),
        ({"dual_rate": -1.0}, "dual_rate=-1.0 must be above zero"),
        ({"dual_rate": math.nan}, "dual_rate=nan must be above zero"),
        ({"params": None}, "needs at least one limit"),
        ({"layers": {"nine": 0.5}}, "names the layer 'nine', which this model does not have; there are: 0, 2, 4"),
    ],
)
def test_wrong_budgets_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BudgetError, match=re.escape(sentence)):
        Budget(gated_again("mlp"), **{"params": 0.5, **options})


# ---- fixed gates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [True, False])
def test_fixed_gates_feel_no_pressure(noise: bool) -> None:
    one = gated_again("residual", 3)
    budget = Budget(one, params=0.2, dual_rate=0.5)
    budget.pressure()
    budget.step()
    before = budget.state_dict()
    assert before["multiplier"].item() > 0
    one.fix(noise)
    value = budget.pressure()
    assert value.item() == 0
    assert value.dtype == torch.float32
    assert not value.requires_grad
    budget.step()
    after = budget.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert budget.readings()[0]["deployed"] == counted(one, one.keep(), INPUTS["residual"]())["params"]


def test_the_last_budget_is_the_one_that_counts() -> None:
    one = gated_again("mlp", 3)
    first = Budget(one, params=0.5)
    second = Budget(one, macs=0.5)
    assert one.budget is second
    assert (repr(first), repr(second)) == ("Budget(params=50%)", "Budget(macs=50%)")
