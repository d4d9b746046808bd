"""Weights that are removed where they stand: blocks, n of every m; layouts, costs, training, landing, files."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import lenet, mlp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import prunus
from prunus.cost import Cost
from prunus.errors import ModelError, PrunusWarning
from prunus.gated import Gated
from prunus.graph import analyse
from prunus.measure import count_macs
from prunus.scatter import Scattered, from_json, laid_out, matrix, read, shared, within

pytestmark = pytest.mark.filterwarnings("ignore:The landing had to close", "ignore:This model", "ignore:.*does nothing")

KINDS = ("weights", "5x3", "4x4", "16x16", "1x7", "2:4", "1:4", "3:4", "1:2")
INPUTS = {"lenet": torch.randn(2, 1, 28, 28), "mlp": torch.randn(2, 1, 4, 4)}
MAKE = {"lenet": lenet, "mlp": mlp}


def gated_model(name: str, units: str, seed: int = 0, shift: float = 0.0, **options: Any) -> Gated:
    torch.manual_seed(seed)
    gated = prunus.gate(MAKE[name](), INPUTS[name], units=units, **options)
    with torch.no_grad():
        gated.log_alpha.copy_((2 * torch.randn(gated.units) + shift).clamp(gated.gates.low, gated.gates.high))
    return gated


# ---- the layout, by plain loops --------------------------------------------------------------------------------------


def unit_at(name: str, shape: tuple[int, ...], block: tuple[int, int], place: int) -> tuple[str, int]:
    """Which group and unit a weight belongs to."""
    rows, columns = shape[0], math.prod(shape[1:])
    (r, c), (i, j) = block, divmod(place, columns)
    low, right = i >= rows // r * r, j >= columns // c * c
    if low and right:
        return f"{name}#corner", 0
    if low:
        return f"{name}#bottom", j // c
    return (f"{name}#right", i // r) if right else (name, i // r * (columns // c) + j // c)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple), st.tuples(st.integers(1, 9), st.integers(1, 9)))
@settings(max_examples=150, deadline=None)
def test_a_layout_agrees_with_a_plain_loop_and_is_what_is_read_back(
    shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    places = [unit_at("w", shape, block, k) for k in range(math.prod(shape))]
    count = {group: len({unit for g, unit in places if g == group}) for group, _ in places}
    weights = {group: sum(g == group and unit == 0 for g, unit in places) for group in count}
    layout = laid_out(Scattered((), block), "w", shape)
    least = 1 if block == (1, 1) else 2
    alive = [group for group in ("w", "w#right", "w#bottom", "w#corner") if count.get(group, 0) >= least]
    if isinstance(layout, str):
        assert not alive
        assert layout == f"it holds no two equal blocks of {block[0]}x{block[1]}"
        return
    assert layout.units(shape) == {group: count[group] for group in alive}
    assert layout.numbers(shape) == {group: weights[group] for group in alive}
    assert layout.rest(shape) == sum(group not in alive for group, _ in places)
    values = {group: torch.randn(count[group]) for group in alive}
    wanted = [float(values[group][unit]) if group in alive else 1.0 for group, unit in places]
    assert layout.over(values, shape).flatten().tolist() == wanted
    assert layout.over(values, shape).shape == shape
    assert from_json(layout.to_json(), shape) == layout


def test_what_is_within_and_shared_agrees_with_all_outcomes() -> None:
    generator = torch.Generator().manual_seed(0)
    for n, m in ((1, 2), (2, 4), (3, 4), (1, 5), (7, 17), (3, 20)):
        values = torch.rand(6 * m, generator=generator)
        rows = within(values, n, m).view(-1, m)
        assert [set(row.nonzero().flatten().tolist()) for row in rows] == [
            set(row.topk(n).indices.tolist()) for row in values.view(-1, m)
        ]
        assert within(torch.zeros(m), n, m).tolist() == [1.0] * n + [0.0] * (m - n)  # of equal ones the first
        if m > 5:
            continue
        p = torch.rand(2 * m, generator=generator, dtype=torch.float64).requires_grad_(True)
        found = shared(p, n, m).view(2, m)
        for row, q in zip(p.view(2, m), found, strict=True):
            wanted = row.new_zeros(())
            for bits in itertools.product([0, 1], repeat=m):
                chance = torch.stack([one if bit else 1 - one for one, bit in zip(row, bits, strict=True)]).prod()
                wanted = wanted + chance * min(n, sum(bits))
            torch.testing.assert_close(q.sum(), wanted)
            torch.testing.assert_close(q / q.sum(), row / row.sum())
        (slope,) = torch.autograd.grad(found.sum(), p)  # the proportion is taken as given
        torch.testing.assert_close(slope * p, found.flatten())
    assert shared(torch.zeros(4), 2, 4).tolist() == [0, 0, 0, 0]


def test_the_expected_count_is_the_mean_of_samples() -> None:
    gated = gated_model("mlp", "2:4", 1)
    with torch.no_grad():
        mean = sum(float((gated.sample() > 0).sum()) for _ in range(400)) / 400
    expected = float(gated.p_active().sum())
    assert expected < float(gated.p_active(alone=True).sum())
    assert mean == pytest.approx(expected, rel=0.01)
    assert gated.expected()["params"] == pytest.approx(expected + 26 + 40, rel=1e-6)  # biases, and rows of 10


# ---- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", KINDS)
@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_costs_are_what_is_in_the_weights_and_in_the_file(name: str, units: str, tmp_path: Path) -> None:
    """Parameters by counting weights at units that stay, bytes by the tensors of the file, MACs by uses of a weight."""
    gated = gated_model(name, units, 3)
    kind, keep = read(units), {group: set(kept) for group, kept in gated.keep().kept().items()}
    assert kind is not None
    params, macs = 0, 0.0
    for tensor, weight in gated.model.named_parameters():
        layout = gated.graph.scattered.get(tensor)
        kept = weight.numel()
        if layout is not None:
            at = [unit_at(tensor, tuple(weight.shape), kind.block, k) for k in range(weight.numel())]
            kept = sum(group not in keep or unit in keep[group] for group, unit in at)
        params += kept
        uses = {"conv1.weight": 24 * 24, "conv2.weight": 8 * 8}.get(tensor, 1)
        macs += kept * uses if weight.dim() > 1 else 0
    said = gated.deployed()
    assert (said["params"], said["macs"]) == (params, macs)
    assert gated.cost.dense()["macs"] == count_macs(gated.model, (INPUTS[name],))
    small, receipt = prunus.shrink(gated, INPUTS[name], seconds=0)
    prunus.save(small, tmp_path / "small.safetensors")
    tensors = load_file(tmp_path / "small.safetensors")
    assert said["bytes"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert sum(tensors[n].numel() for n in gated.model.state_dict()) == params
    assert receipt["deployed"]["bytes"] == said["bytes"]
    assert {n: set(group["kept"]) for n, group in receipt["groups"].items()} == keep
    loaded = prunus.load(MAKE[name](), tmp_path / "small.safetensors").eval()
    for one, two in zip(loaded.state_dict().values(), small.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(loaded(INPUTS[name]), small.eval()(INPUTS[name]))
    prunus.save(loaded, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "small.safetensors").read_bytes()


def test_edges_are_groups_of_their_own_and_density_counts_weights() -> None:
    graph = analyse(lenet(), (INPUTS["lenet"],), units="4x16")
    shapes = {name: stored.shape for name, stored in graph.tensors.items()}
    assert [matrix(shapes[name]) for name in graph.scattered] == [(7, 150), (9, 112), (4, 9)][: len(graph.scattered)]
    assert graph.sizes == {
        "conv2.weight": 9, "conv2.weight#bottom": 9, "fc1.weight": 14, "fc1.weight#bottom": 7,
    }  # fmt: skip
    assert [(f.axis, f.operation) for f in graph.frozen] == [
        ("conv1.weight", "it holds no two equal blocks of 4x16"),
        ("fc2.weight", "it holds no two equal blocks of 4x16"),
    ]
    cost = Cost(graph)
    assert cost.one_sided["conv2.weight"] == {"conv2.weight": 64, "conv2.weight#bottom": 48}
    assert cost.dense()["params"] == sum(p.numel() for p in lenet().parameters())
    frozen = analyse(lenet(), (INPUTS["lenet"],), units="4x16", freeze_names=["fc1.weight#bottom"])
    assert list(frozen.sizes) == ["conv2.weight", "conv2.weight#bottom", "fc1.weight"]
    assert Cost(frozen).dense()["params"] == cost.dense()["params"]
    assert list(analyse(lenet(), (INPUTS["lenet"],), units="4x16", only=["fc1"]).scattered) == ["fc1.weight"]


# ---- n of every m ----------------------------------------------------------------------------------------------------


def is_within(weight: Tensor, n: int, m: int) -> bool:
    """Row by row, every m in turn, in plain Python."""
    for row in weight.detach().flatten(1).tolist():
        for k in range(0, len(row), m):
            if sum(value != 0 for value in row[k : k + m]) > n:
                return False
    return True


@pytest.mark.parametrize("units", ["2:4", "1:4", "1:2"])
@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_no_more_than_n_of_every_m_weights_are_there(units: str, shift: float) -> None:
    kind = read(units)
    assert kind is not None
    assert kind.most is not None
    for name, seed in itertools.product(MAKE, range(2)):
        gated = gated_model(name, units, seed, shift)
        folded = gated.fold()
        assert list(folded) == list(gated.graph.scattered)
        for weights in (folded, gated._multiplied(gated.sample())):
            assert all(is_within(weight, *kind.most) for weight in weights.values())
        share = kind.most[0] / kind.most[1]
        open_ = gated.open_units()
        assert int(open_.sum()) <= share * gated.units
        for group, start in gated.cost.offsets.items():  # the most probable: no closed one beats an open one in its row
            values = gated.log_alpha[start : start + gated.graph.sizes[group]].view(-1, kind.most[1])
            kept = open_[start : start + gated.graph.sizes[group]].view(values.shape).bool()
            worst = values.masked_fill(~kept, torch.inf).amin(1)
            assert bool((values.masked_fill(kept, -torch.inf).amax(1) <= worst).all())
        assert torch.equal(open_, gated.nearly_open().to(open_)) or shift < 0  # but for groups that would be empty


def test_weights_whose_rows_do_not_divide_are_frozen_by_name() -> None:
    graph = analyse(lenet(), (INPUTS["lenet"],), units="2:4")
    assert list(graph.scattered) == ["fc1.weight"]
    assert {(f.axis, f.operation, f.module) for f in graph.frozen} == {
        ("conv1.weight", "its 25 columns (inputs x kernel) are no multiple of 4", "conv1"),
        ("conv2.weight", "its 150 columns (inputs x kernel) are no multiple of 4", "conv2"),
        ("fc2.weight", "its 9 columns (inputs x kernel) are no multiple of 4", "fc2"),
    }
    up = nn.Sequential(nn.ConvTranspose2d(4, 8, 2), nn.Flatten(), nn.Linear(200, 4))
    graph = analyse(up, (torch.randn(2, 4, 4, 4),), units="2:4")
    assert list(graph.scattered) == ["2.weight"]
    assert [(f.axis, f.operation) for f in graph.frozen] == [("0.weight", "its inputs do not lie along its rows")]


@pytest.mark.parametrize("units", ["2:4", "4x4", "5x3"])
def test_training_then_landing_then_polish(units: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 1, 4, 4), torch.randint(0, 4, (64,))
    gated = prunus.gate(mlp(), x[:2], units=units, keep=0.8)
    budget = prunus.Budget(gated, params=0.35, dual_rate=0.05)
    opt = torch.optim.Adam([{"params": gated.weight_parameters()}, {"params": gated.gate_parameters(), "lr": 0.1}])
    start = gated.log_alpha.detach().clone()

    def steps(count: int) -> None:
        for _ in range(count):
            loss = F.cross_entropy(gated(x), y) + budget.pressure()
            opt.zero_grad()
            loss.backward()
            opt.step()
            budget.step()

    before = gated.expected()["params"]
    steps(12)
    assert bool((gated.log_alpha != start).any())
    assert gated.expected()["params"] < before
    prunus.land(gated)
    assert budget.met()
    gated.fix(noise=True)
    steps(4)
    gated.eval()
    small, receipt = prunus.shrink(gated, x[:2], seconds=0)
    torch.testing.assert_close(small(x), gated(x))
    assert receipt["exactness"]["ok"]
    assert receipt["budgets"][0]["met"]
    weights = [small.get_parameter(name) for name in gated.graph.scattered]
    assert sum(int((weight != 0).sum()) for weight in weights) <= 0.35 * gated.cost.dense()["params"]
    if units == "2:4":
        assert all(is_within(weight, 2, 4) for weight in weights)


@pytest.mark.parametrize("units", ["2:4", "5x3"])
def test_gradients_reach_the_gates_that_are_drawn_and_pressure_reaches_all(units: str) -> None:
    gated = gated_model("mlp", units, 2).double().train()
    x = INPUTS["mlp"].double()
    torch.manual_seed(5)
    z = gated.sample()
    torch.manual_seed(5)
    gated(x).square().sum().backward()
    grad = gated.log_alpha.grad
    assert grad is not None
    inside = (z > 0) & (z < 1)
    assert bool((grad[~inside] == 0).all())
    assert bool((grad[inside] != 0).any())
    budget = prunus.Budget(gated, params=0.4, macs=0.3)
    with torch.no_grad():
        budget.multiplier.weight.copy_(torch.tensor([1.5, 0.7]))
    gated.log_alpha.grad = None
    value = budget.pressure()
    value.backward()
    found = gated.log_alpha.grad
    assert found is not None
    assert bool((found > 0).all())
    at = gated.log_alpha.detach().clone()
    for k in range(0, gated.units if units == "5x3" else 0, 37):  # against differences, where that is what it is
        values = []
        for step in (1e-4, -1e-4):
            gated.log_alpha.data.copy_(at)
            gated.log_alpha.data[k] += step
            values.append(float(budget.multiplier.weight.detach().double() @ _relative(budget)))
        assert (values[0] - values[1]) / 2e-4 == pytest.approx(float(found[k]), rel=1e-3, abs=1e-7)
    gated.log_alpha.data.copy_(at)
    assert float(value) == pytest.approx(float(budget.multiplier.weight.double() @ _relative(budget)), rel=1e-5)


def _relative(budget: prunus.Budget) -> Tensor:
    p = budget.gated.p_active().detach().double()
    return torch.stack([cost / limit - 1 for cost, limit in zip(budget._rows(p), budget.limits, strict=True)])


def test_limits_fall_from_what_all_gates_open_cost() -> None:
    gated = prunus.gate(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(2, 16), units="2:4")
    budget = prunus.Budget(gated, params=0.25)
    most = 16 * 8 // 2 + 8 + 8 * 4 // 2 + 4
    assert (budget.dense, budget.most) == ([172.0], [float(most)])
    budget.tighten(0)
    assert budget.now.tolist() == [most]
    budget.tighten(1)
    assert budget.now.tolist() == [43.0]
    with pytest.warns(PrunusWarning, match="allows what the model costs with all gates open, 92 parameters"):
        prunus.Budget(gated, params=0.6)


def test_pressure_closes_gates_although_all_of_a_row_are_open() -> None:
    gated = prunus.gate(mlp(), INPUTS["mlp"], units="2:4", keep=0.95)
    budget = prunus.Budget(gated, params=0.4, dual_rate=0.05)
    opt = torch.optim.Adam(gated.gate_parameters(), lr=0.1)
    for _ in range(60):
        opt.zero_grad()
        budget.pressure().backward()
        opt.step()
        budget.step()
    assert budget.met()


def test_expected_l2_by_a_plain_sum() -> None:
    gated = gated_model("mlp", "5x3", 4)
    parts = dict(zip(gated.graph.sizes, gated.p_active().split(list(gated.graph.sizes.values())), strict=True))
    total = 0.0
    for name, weight in gated.model.named_parameters():
        for k, value in enumerate(weight.detach().flatten().tolist()):
            group, unit = unit_at(name, tuple(weight.shape), (5, 3), k)
            total += value**2 * (float(parts[group][unit]) if group in parts else 1.0)
    assert float(gated.expected_l2()) == pytest.approx(total, rel=1e-5)


@given(st.sampled_from(KINDS), st.integers(0, 1000), st.sampled_from([-2.0, 0.0, 2.0]), st.floats(0, 0.99))
@settings(max_examples=25, deadline=None)
def test_any_gates_land_under_any_reachable_limit(units: str, seed: int, shift: float, share: float) -> None:
    gated = gated_model("mlp", units, seed, shift)
    if not gated.units:
        return
    low = gated.cost.whole(gated.open_units(torch.full((gated.units,), gated.gates.low))).tolist()
    dense = gated.cost.dense()
    limits = [a + share * (dense[what] - a) for what, a in zip(dense, low, strict=True)]
    budget = prunus.Budget(gated, params=max(1, math.ceil(limits[0])), bytes=math.ceil(limits[2]))
    before = gated.open_units()
    prunus.land(gated)
    assert budget.met()
    assert bool((gated.open_units() <= before).all())
    small = copy.deepcopy(prunus.shrink(gated, INPUTS["mlp"], seconds=0)[0])
    assert sum(int((p != 0).sum()) for p in small.parameters()) <= limits[0] + 1


def test_a_layer_starts_at_the_scale_of_what_can_be_open() -> None:
    for units, keep, share in (("2:4", 0.9, 0.5), ("2:4", 0.3, 0.3), ("4x4", 0.8, 0.8)):
        torch.manual_seed(0)
        model = mlp()
        dense = copy.deepcopy(model)
        gated = prunus.gate(model, INPUTS["mlp"], units=units, keep=keep)
        assert gated.graph.scattered["1.weight"].groups[0] == "1.weight"
        torch.testing.assert_close(model[1].weight, dense[1].weight / share)


# ---- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", ["0x4", "4x0", "2:2", "4:2", "0:4", "2:0"])
def test_kinds_that_make_no_sense_are_refused(units: str) -> None:
    with pytest.raises(ModelError, match=f"units='{units}': .*, such as (16x16|2:4)"):
        prunus.gate(mlp(), INPUTS["mlp"], units=units)


@pytest.mark.parametrize("units", ["16", "16x", "x16", "16x16x16", "2:4:8", "-2:4", "2 : 4", "²x²", "blocks", 4, None])
def test_unknown_kinds_are_refused_with_all_there_is(units: Any) -> None:
    with pytest.raises(ModelError, match=r"is not a kind of unit; .*; also blocks of weights such as 16x16, or n of"):
        prunus.gate(mlp(), INPUTS["mlp"], units=units)


def test_other_options_that_do_not_go_with_it() -> None:
    for units in ("2:4", "4x4"):
        with pytest.raises(ModelError, match="not for weights or blocks where they stand"):
            prunus.gate(mlp(), INPUTS["mlp"], units=units, per_example=True)
        with pytest.raises(ModelError, match="no width changes"):
            prunus.gate(mlp(), INPUTS["mlp"], units=units, round_to=8)


def test_layouts_say_what_they_are() -> None:
    assert str(Scattered(())) == "its weights one by one"
    assert str(Scattered((), (16, 4))) == "blocks of 16x4 weights"
    assert str(Scattered((), (1, 1), (2, 4))) == "2 of every 4 of its weights at most"
