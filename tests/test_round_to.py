"""Round widths: which units make them up, what they cost, and how the landing closes whole bunches."""

import copy
from functools import cache
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import CASES, Case, Net, images
from torch import Tensor, nn

import prunus
from prunus.axes import Graph, Group, Keep
from prunus.errors import BudgetError, ModelError, PrunusError
from prunus.front import analyse_and_prove
from prunus.gated import Gated
from prunus.measure import count_bytes, count_macs, count_params
from prunus.openness import WIDTHS, Openness
from prunus.surgery import Inputs, slice_model
from prunus.train import Settings

pytestmark = pytest.mark.filterwarnings(
    "ignore:The landing had to close", "ignore:.*it does nothing", "ignore:This model"
)


def two_readers() -> nn.Module:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = m.conv(x).relu().flatten(1)
        return m.out_a(m.a(x).relu()), m.out_b(m.b(x).relu())

    return Net(
        forward,
        conv=nn.Conv2d(1, 11, 3),
        a=nn.Linear(44, 9),
        b=nn.Linear(44, 6),
        out_a=nn.Linear(9, 2),
        out_b=nn.Linear(6, 2),
    )


ZOO = {case.name: case for case in CASES} | {"two readers": Case("two readers", two_readers, images(1, 4), {})}
NAMES = (
    "mlp", "lenet", "residual", "mobile", "grouped", "concat", "mixer", "shared module", "two flattened branches",
    "two readers",
)  # fmt: skip


@cache
def analysed(name: str) -> tuple[nn.Module, Graph, Inputs]:
    torch.manual_seed(0)
    case: Case = ZOO[name]
    model, inputs = case.make(), Inputs(case.args(), case.kwargs())
    return model, analyse_and_prove(model, inputs, units=case.units), inputs


def gated_model(name: str, seed: int, shift: float, round_to: int) -> Gated:
    model, graph, _ = analysed(name)
    gated = Gated(copy.deepcopy(model), graph, round_to=round_to)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        spread = 2 * torch.randn(gated.units, generator=generator) + shift
        gated.log_alpha.copy_(spread.clamp(gated.gates.low + 0.1, gated.gates.high))
    return gated


def parts(gated: Gated, flat: Tensor) -> dict[str, Tensor]:
    return dict(zip(gated.graph.sizes, flat.split(list(gated.graph.sizes.values())), strict=True))


def slowly(gated: Gated) -> dict[str, set[int]]:
    """The definition in plain loops: from what stays without rounding, fill up with the most probable."""
    plain = Gated(copy.deepcopy(gated.model), gated.graph)
    plain.log_alpha.data.copy_(gated.log_alpha)
    asked = {name: set(kept) for name, kept in plain.keep().kept().items()}
    fine = {both.fine.group: both for _, both in gated.graph.fine_axes()}
    values = {name: part.tolist() for name, part in parts(gated, gated.log_alpha.detach()).items()}
    result: dict[str, set[int]] = {}
    for name in sorted(asked, key=lambda name: name in fine):
        there = set(range(gated.graph.sizes[name]))
        if name in fine:
            kept = {n: torch.tensor([k in s for k in range(gated.graph.sizes[n])]) for n, s in result.items()}
            there = set(Keep(gated.graph, kept).positions(fine[name].base).nonzero().flatten().tolist())
        m = gated.round_to if gated.graph.group(name).unit in WIDTHS else 1
        wanted = min(len(there), m * ceil(len(asked[name]) / m))
        rest = sorted(there - asked[name], key=lambda k, n=name: (-values[n][k], k))
        result[name] = asked[name] | set(rest[: wanted - len(asked[name])])
    return result


def is_round(gated: Gated, keep: Keep) -> bool:
    """Is every width a multiple, or all there is?"""
    bases = {both.fine.group: keep.positions(both.base) for _, both in gated.graph.fine_axes()}
    for group in gated.graph.groups:
        count = int(keep.units[group.name].sum())
        everything = int(bases[group.name].sum()) if group.name in bases else group.size
        if count % gated.round_to and count != everything:
            return False
    return True


def counted(model: nn.Module, inputs: Inputs) -> dict[str, int]:
    return {
        "params": count_params(model),
        "macs": count_macs(model, inputs.args, inputs.kwargs),
        "bytes": count_bytes(model),
    }


@given(
    st.sampled_from(NAMES),
    st.integers(0, 10_000),
    st.sampled_from([-5.0, -2.0, 0.0, 2.0]),
    st.sampled_from([2, 3, 4, 8]),
)
@settings(max_examples=60, deadline=None)
def test_widths_are_round_by_the_most_probable_units_and_cost_what_the_shrunk_model_does(
    name: str, seed: int, shift: float, round_to: int
) -> None:
    gated = gated_model(name, seed, shift, round_to)
    inputs = analysed(name)[2]
    keep = gated.keep()
    assert {n: set(kept) for n, kept in keep.kept().items()} == slowly(gated)
    assert is_round(gated, keep)
    small = slice_model(gated.model, gated.graph, keep, gated.fold())
    assert gated.deployed() == gated.cost.of(keep) == counted(small, inputs)
    budget = prunus.Budget(gated, params=1.0)
    assert budget.readings()[0]["deployed"] == counted(small, inputs)["params"]
    budget.state()
    assert budget._strict is not None  # what the multipliers follow is the rounded count
    seen = (float(budget._strict) + 1) * float(budget.now)
    assert seen == pytest.approx(counted(small, inputs)["params"], rel=1e-5)


@given(
    st.sampled_from(NAMES),
    st.integers(0, 10_000),
    st.sampled_from([-3.0, 0.0, 2.0]),
    st.sampled_from([2, 3, 4, 8]),
    st.dictionaries(st.sampled_from(["params", "macs", "bytes"]), st.floats(0, 0.99), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_any_gates_land_on_round_widths_under_any_reachable_limits(
    name: str, seed: int, shift: float, round_to: int, amounts: dict[str, float]
) -> None:
    gated = gated_model(name, seed, shift, round_to)
    inputs = analysed(name)[2]
    lowest = torch.full((gated.units,), gated.gates.low)
    least = gated.cost.whole(gated.open_units(lowest)).tolist()
    dense = gated.cost.dense()
    limits = {}
    for what, low in zip(("params", "macs", "bytes"), least, strict=True):
        if what in amounts and low < dense[what]:
            limits[what] = min(1.0, (low + amounts[what] * (dense[what] - low)) / dense[what])
    if not limits:  # every group is smaller than what it is rounded to
        return
    budget = prunus.Budget(gated, **limits)
    before, met = gated.keep(), budget.met()
    result = prunus.land(gated)
    keep = gated.keep()
    assert budget.met()
    assert is_round(gated, keep)
    assert (result.closed == 0 and keep == before) if met else result.closed > 0
    small, receipt = prunus.shrink(gated, inputs, seconds=0)
    measured = counted(small, inputs)
    assert {what: receipt["deployed"][what] for what in measured} == measured == gated.cost.of(keep)
    assert all(line["met"] and line["deployed"] <= line["limit"] * (1 + 1e-9) for line in receipt["budgets"])
    assert receipt["exactness"]["ok"]
    assert receipt["run"]["round_to"] == round_to
    assert {name: group["kept"] for name, group in receipt["groups"].items()} == keep.kept()


def chain(widths: tuple[int, ...], round_to: int, location: Any) -> Gated:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    gated = prunus.gate(nn.Sequential(*layers[:-1]), torch.randn(2, widths[0]), units="groups", round_to=round_to)
    with torch.no_grad():
        gated.log_alpha.copy_(torch.as_tensor(location))
    return gated


def test_a_landing_closes_the_least_probable_bunch() -> None:
    """19 of 24 units ask to stay: three go before the width falls to 16, and then eight more to 8."""
    location = torch.linspace(-3, 4, 24)
    gated = chain((5, 24, 3), 8, location)
    asked = int(gated.asked_units().sum())
    assert (asked, int(gated.open_units().sum())) == (19, 24)
    prunus.Budget(gated, params=3 + 17 * 9)
    result = prunus.land(gated)
    assert gated.keep().kept() == {"0": list(range(8, 24))}
    assert (result.closed, int(gated.asked_units().sum())) == (8, 16)
    prunus.Budget(gated, params=3 + 15 * 9)
    prunus.land(gated)
    assert gated.keep().kept() == {"0": list(range(16, 24))}
    with pytest.raises(BudgetError, match="with round_to=8 units left in every group"):
        prunus.Budget(gated, params=3 + 7 * 9)


def test_a_nearly_empty_bunch_goes_first() -> None:
    """Nine units cost what sixteen do: one gate saves eight units, so it goes before a less probable one that fills."""
    first, second = torch.full((16,), -4.0), torch.full((16,), 3.0)
    first[:9] = torch.tensor([2.0, 3, 3, 3, 3, 3, 3, 3, 3])
    second[0] = 1.0
    gated = chain((4, 16, 16, 4), 8, torch.cat([first, second]))
    assert gated.deployed() == gated.cost.dense()
    prunus.Budget(gated, params=gated.cost.dense()["params"] - 100)
    assert prunus.land(gated).closed == 8
    assert {name: len(kept) for name, kept in gated.keep().kept().items()} == {"0": 8, "2": 16}
    assert int(gated.asked_units().sum()) == 8 + 16


@pytest.mark.parametrize("seed", range(6))
def test_the_landing_agrees_with_a_plain_loop_over_sliced_modules(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    widths, m = (5, 18, 13, 3), 4
    gated = chain(widths, m, 2 * torch.randn(31, generator=generator) + 1)
    inputs = Inputs.of(torch.randn(2, 5))
    low, dense = 1 * (5 * 4 + 4 + 4 * 4 + 4 + 4 * 3 + 3), gated.cost.dense()["params"]
    limit = low + (0.15 + 0.1 * seed) * (dense - low)
    gates = {name: part.tolist() for name, part in parts(gated, gated.log_alpha.detach()).items()}

    def params(number: dict[str, int]) -> int:
        keep = Keep(gated.graph, {n: torch.arange(gated.graph.sizes[n]) < k for n, k in number.items()})
        return counted(slice_model(gated.model, gated.graph, keep), inputs)["params"]

    def width(name: str, count: int) -> int:
        return min(gated.graph.sizes[name], m * ceil(count / m))

    asked = {name: sorted((v, k) for k, v in enumerate(row) if v > gated.threshold) for name, row in gates.items()}
    while True:  # bunch by bunch: the lowest worth per saving, while half of what is too much allows several at once
        counts = {name: len(row) for name, row in asked.items()}
        now = params({name: width(name, n) for name, n in counts.items()})
        if now <= limit:
            break
        ranked = []
        for name, n in counts.items():
            left, turn = n, 0
            while width(name, left) > m:
                target = m * ((left - 1) // m)
                going = asked[name][turn : turn + left - target]
                worth = sum(
                    1 / (1 + 2.718281828459045 ** -(v - gated.threshold)) / ((n - turn - i) / gated.graph.sizes[name])
                    for i, (v, _) in enumerate(going)
                )
                one = {g: width(g, c) for g, c in counts.items()}
                unit = params(one) - params({**one, name: one[name] - 1})
                ranked.append((worth / (unit * (width(name, left) - target)), worth, name, going, turn == 0))
                ranked[-1] += (unit * (width(name, left) - target),)
                turn, left = turn + left - target, target
        ranked.sort(key=lambda row: row[0])
        planned, many = 0, 0
        for row in ranked:
            planned += row[5]
            many += planned <= 0.5 * (now - limit)
        if many <= 1 and ranked[0][5] >= now - limit:
            among = [r for r in ranked if r[4] and r[5] >= now - limit and r[1] <= ranked[0][1] + 0.1 * m]
            ranked = [min(among, key=lambda row: row[5])]
        for _, _, name, going, *_ in ranked[: max(1, many)]:
            asked[name] = [row for row in asked[name] if row not in going]
    prunus.Budget(gated, params=int(limit))
    prunus.land(gated)
    found = {name: set(part.nonzero().flatten().tolist()) for name, part in parts(gated, gated.asked_units()).items()}
    assert found == {name: {k for _, k in row} for name, row in asked.items()}


def test_groups_smaller_than_the_step_stay_whole_and_kinds_without_width_are_left_alone() -> None:
    groups = tuple(Group(f"g{k}", 5, unit, (), (), ()) for k, unit in enumerate(["map", "head", "neuron", "weight"]))
    openness = Openness(Graph({}, groups), round_to=8)
    kept = openness.kept(openness.key(torch.tensor([1.0, -9, -9, -9, -9] * 4)), 0.0)
    assert kept.view(4, 5).sum(1).tolist() == [5, 1, 5, 1]


def test_closed_units_that_make_up_the_number_are_zero_and_stay_so_when_the_gates_are_fixed() -> None:
    gated = chain((5, 24, 3), 8, torch.linspace(-3, 4, 24)).eval()
    keep = gated.keep()
    x = torch.randn(7, 5)
    outside = slice_model(gated.model, gated.graph, Keep(gated.graph, {"0": gated.asked_units().bool()}), gated.fold())
    inside, _ = prunus.shrink(gated, x, seconds=0)
    torch.testing.assert_close(inside(x), outside(x))
    torch.testing.assert_close(inside(x), gated(x))
    gated.fix(noise=False)
    assert gated.keep() == keep
    torch.testing.assert_close(gated(x), inside(x))


def test_a_saved_round_model_loads(tmp_path: Path) -> None:
    gated = gated_model("lenet", 3, 0.0, 2)
    inputs = analysed("lenet")[2]
    small, _ = prunus.shrink(gated, inputs, seconds=0)
    prunus.save(small, tmp_path / "small.safetensors")
    again = prunus.load(copy.deepcopy(gated.model), tmp_path / "small.safetensors")
    assert torch.equal(again.eval()(*inputs.args), small.eval()(*inputs.args))
    state = gated.state_dict()
    gated_model("lenet", 4, 0.0, 2).load_state_dict(state)
    with pytest.raises(ModelError, match="made with round_to=2, and the model was gated with round_to=4"):
        gated_model("lenet", 4, 0.0, 4).load_state_dict(state)


@pytest.mark.parametrize("wrong", [0, -8, 2.5, 8.0, True, "8", None])
def test_wrong_steps_are_refused_in_a_sentence(wrong: Any) -> None:
    with pytest.raises(ModelError, match=r"round_to is .*; write the whole number, 1 or more"):
        prunus.gate(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4), round_to=wrong)


def test_single_weights_have_no_width() -> None:
    with pytest.raises(ModelError, match="no width changes"):
        prunus.gate(nn.Linear(4, 8), torch.randn(2, 4), units="weights", round_to=8)


def test_the_setting_is_checked_too() -> None:
    assert Settings(round_to=8).as_dict()["round_to"] == 8
    with pytest.raises(PrunusError, match="The setting round_to is 0; it must be 1 or more"):
        Settings(round_to=0)
