"""Costs against what is counted on sliced modules, against enumeration of all gate states, and against samples."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from model_zoo import CASES, Case, images, lenet, mlp, vectors
from torch import Tensor, nn
from torch.autograd import gradcheck

from prunus.axes import Axis, Graph, Group, Keep, Stored, Work
from prunus.cost import MEASURES, Cost, Row, count, nested
from prunus.errors import ModelError
from prunus.graph import analyse
from prunus.measure import count_bytes, count_macs, count_params
from prunus.moments import raw_moment
from prunus.surgery import prove, slice_model
from prunus.terms import Both, Cat, Leaf, Prod, Term, spread

SLICED = [case for case in CASES if case.units != "weights" and case.name not in ("view literal", "channel shuffle")]


def random_keep(graph: Graph, seed: int) -> Keep:
    generator = torch.Generator().manual_seed(seed)
    units = {}
    for name, size in graph.sizes.items():
        units[name] = torch.rand(size, generator=generator) < torch.rand(1, generator=generator)
        units[name][int(torch.randint(size, (1,), generator=generator))] = True
    return Keep(graph, units)


def counted(model: nn.Module, case: Case) -> dict[str, int]:
    macs = count_macs(model, case.args(), case.kwargs())
    return {"params": count_params(model), "macs": macs, "bytes": count_bytes(model)}


def test_as_many_models_are_counted_as_there_are() -> None:
    assert len(SLICED) == 42


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_dense_cost_is_what_is_counted(case: Case) -> None:
    model = case.make()
    graph = analyse(model, case.args(), case.kwargs(), units=case.units)
    cost = Cost(graph)
    assert cost.dense() == counted(model, case)


@pytest.mark.parametrize("case", SLICED, ids=str)
def test_the_cost_of_a_keep_is_what_is_counted_on_the_sliced_module(case: Case) -> None:
    model = case.make()
    graph = analyse(model, case.args(), case.kwargs(), units=case.units)
    cost = Cost(graph)
    tried = 0
    for seed in range(4):
        try:
            keep = random_keep(graph, seed).closed()
        except ModelError:  # the finer units that were drawn all lie under removed ones
            continue
        assert cost.of(keep) == counted(slice_model(model, graph, keep), case)
        tried += 1
    assert tried > 1


@pytest.mark.parametrize("units", ["structured", "groups"])
def test_what_proving_leaves_is_counted_too(units: str) -> None:
    case = next(case for case in CASES if case.name == "view literal")
    model = case.make()
    graph = prove(model, analyse(model, case.args(), units=units), case.args(), "eager")
    assert list(graph.sizes) == (["fc.inputs"] if units == "structured" else [])
    keep = random_keep(graph, 0).closed()
    assert Cost(graph).of(keep) == counted(slice_model(model, graph, keep), case)


def test_scattered_weights_are_counted_one_by_one() -> None:
    graph = analyse(lenet(), images(1, 28)(), units="weights")
    keep = Keep(graph, {"fc1.weight": torch.arange(1008) < 100, "conv1.weight": torch.arange(150) < 30})
    cost = Cost(graph).of(keep)
    biases = 6 + 7 + 9 + 4
    assert cost["params"] == 30 + 1050 + 100 + 36 + biases
    assert cost["bytes"] == 4 * cost["params"] + 19 + 132 + 126 + 5
    assert cost["macs"] == 30 * 24**2 + 1050 * 8**2 + 100 + 36


# ---- the expected cost -----------------------------------------------------------------------------------------------


def enumerate_states(cost: Cost, p: Tensor) -> list[tuple[float, Tensor]]:
    states = []
    for state in itertools.product([0.0, 1.0], repeat=cost.units):
        open_ = torch.tensor(state, dtype=torch.float64)
        chance = torch.where(open_ == 1, p, 1 - p).prod().item()
        states.append((chance, open_))
    return states


def count_slowly(graph: Graph, open_: Tensor, cost: Cost) -> list[float]:
    """Parameters, MACs and bytes of one 0/1 state, by walking over every number of every tensor. No closure."""
    units = {g.name: open_[cost.offsets[g.name] : cost.offsets[g.name] + g.size] for g in graph.groups}

    def along(term: Term) -> float:
        return sum(spread(term, units).tolist())

    params = macs = size = 0.0
    held = {}
    for name, stored in graph.tensors.items():
        numbers = 1.0
        for term in graph.axes[name]:
            numbers *= along(term)
        held[name] = numbers
        params += numbers if stored.is_parameter else 0
        size += numbers * stored.itemsize if stored.persistent else 0
    for work in graph.works:
        used = held[work.weight]
        for position in work.positions:
            used *= along(position)
        macs += used / work.per
    return [params, macs, size]


def tiny(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if kind == "chain":
        return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.Linear(4, 2)), vectors(2)()
    if kind == "both sides":  # a residual stream of four maps on both sides of a weight
        shared = nn.Conv2d(4, 4, 1)
        return nn.Sequential(nn.Conv2d(1, 4, 1), shared, nn.ReLU(), shared, nn.Conv2d(4, 1, 1)), images(1, 3)()
    if kind == "nested":
        return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(12, 2)), images(1, 3)()
    return nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 6, 2, groups=2), nn.Conv2d(6, 1, 1)), images(1, 3)()


@pytest.mark.parametrize("kind, units", [("chain", 9), ("both sides", 4), ("nested", 15), ("grouped", 7)])
def test_the_expected_cost_is_the_mean_over_all_states(kind: str, units: int) -> None:
    model, args = tiny(kind)
    graph = analyse(model, args)
    cost = Cost(graph)
    assert cost.units == units
    p = torch.rand(units, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    total = torch.zeros(3, dtype=torch.float64)
    if units > 10:  # the rows themselves are the quick reference there, after a few slow ones
        states = torch.tensor(list(itertools.product([0.0, 1.0], repeat=units)), dtype=torch.float64)
        chances = torch.where(states == 1, p, 1 - p).prod(-1)
        values = cost.whole(states)
        for k in range(0, len(states), len(states) // 40):
            assert values[k].tolist() == pytest.approx(count_slowly(graph, states[k], cost), rel=1e-12, abs=1e-9)
        total = (chances[:, None] * values).sum(0)
    else:
        for chance, open_ in enumerate_states(cost, p):
            slow = count_slowly(graph, open_, cost)
            assert cost.whole(open_).tolist() == pytest.approx(slow, rel=1e-12, abs=1e-9)
            total += chance * torch.tensor(slow, dtype=torch.float64)
    assert cost.whole(p).tolist() == pytest.approx(total.tolist(), rel=1e-10)


def test_a_group_on_both_sides_costs_more_than_the_square_of_its_mean() -> None:
    graph = Graph(
        {"w": (Leaf("a", 3), Leaf("a", 3))},
        (Group("a", 3, "map", (), (), ()),),
        tensors={"w": Stored((3, 3), 4, True)},
    )
    p = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    wanted = 1.6**2 + 0.2 * 0.8 + 0.5 * 0.5 + 0.9 * 0.1
    assert Cost(graph).whole(p)[0].item() == pytest.approx(wanted, rel=1e-12)


def test_a_third_power_is_the_mean_over_all_states() -> None:
    graph = Graph(
        {"w": (Leaf("a", 4), Leaf("a", 4), Prod((Leaf(None, 2), Leaf("b", 2)))), "v": (Leaf("a", 4),)},
        (Group("a", 4, "map", (), (), ()), Group("b", 2, "map", (), (), ())),
        works=(Work("", "w", (Leaf("a", 4), Leaf(None, 6)), 3),),
        tensors={"w": Stored((4, 4, 4), 4, True), "v": Stored((4,), 8, False)},
    )
    cost = Cost(graph)
    p = torch.tensor([0.1, 0.6, 0.35, 0.9, 0.5, 0.3], dtype=torch.float64)
    total = torch.zeros(3, dtype=torch.float64)
    for chance, open_ in enumerate_states(cost, p):
        total += chance * torch.tensor(count_slowly(graph, open_, cost), dtype=torch.float64)
    assert cost.whole(p).tolist() == pytest.approx(total.tolist(), rel=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_raw_moments_are_the_mean_over_all_states(p: list[float], power: int) -> None:
    wanted = 0.0
    for state in itertools.product([0, 1], repeat=len(p)):
        chance = math.prod(q if open_ else 1 - q for q, open_ in zip(p, state, strict=True))
        wanted += chance * sum(state) ** power
    found = raw_moment(torch.tensor(p, dtype=torch.float64), power)
    assert found.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_raw_moments_by_the_distribution_of_the_count(p: list[float], power: int) -> None:
    """A second reference: the Poisson binomial's probabilities, by convolution."""
    chances = [1.0]
    for q in p:
        chances = [a * (1 - q) + b * q for a, b in zip([*chances, 0.0], [0.0, *chances], strict=True)]
    wanted = sum(chance * n**power for n, chance in enumerate(chances))
    found = raw_moment(torch.tensor(p, dtype=torch.float64), power)
    assert found.item() == pytest.approx(wanted, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("name", ["residual", "lenet", "two flattened branches", "grouped"])
def test_the_expected_cost_is_the_mean_of_samples(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    cost = Cost(analyse(case.make(), case.args()))
    generator = torch.Generator().manual_seed(5)
    p = torch.rand(cost.units, generator=generator, dtype=torch.float64)
    states = (torch.rand(40_000, cost.units, generator=generator, dtype=torch.float64) < p).double()
    values = cost.whole(states)
    error = values.std(0) / 200
    assert ((values.mean(0) - cost.whole(p)).abs() < 4.5 * error).all()


@pytest.mark.parametrize("kind", ["chain", "both sides", "nested", "grouped"])
def test_the_gradient_is_that_of_finite_differences(kind: str) -> None:
    model, args = tiny(kind)
    rows = Cost(analyse(model, args)).whole
    generator = torch.Generator().manual_seed(1)
    p = torch.rand(int(rows.bounds[-1]), generator=generator, dtype=torch.float64, requires_grad=True)
    assert gradcheck(rows, (p,), rtol=1e-6, atol=1e-4)
    batch = torch.rand(3, p.numel(), generator=generator, dtype=torch.float64)
    assert torch.allclose(rows(batch), torch.stack([rows(one) for one in batch]))
    for power in (2, 3, 4):
        assert gradcheck(lambda q, k=power: raw_moment(q, k), (p,))


def test_float32_probabilities_are_counted_in_float64() -> None:
    graph = Graph(
        {"w": (Leaf("a", 2), Leaf(None, 2**26))},
        (Group("a", 2, "map", (), (), ()),),
        tensors={"w": Stored((2, 2**26), 1, True)},
    )
    assert Cost(graph).whole(torch.ones(2))[0].item() == 2**27
    assert Cost(graph).of(Keep(graph, {"a": torch.tensor([True, False])}))["params"] == 2**26


def test_a_model_without_groups_costs_what_it_costs() -> None:
    graph = analyse(nn.Linear(3, 2), vectors(3)(), units="groups")
    cost = Cost(graph)
    assert cost.units == 0
    assert cost.dense() == {"params": 8, "macs": 6, "bytes": 32}
    assert cost.whole(torch.zeros(0)).tolist() == [8, 6, 32]


# ---- terms as polynomials --------------------------------------------------------------------------------------------


def test_counts_of_terms() -> None:
    assert count(Leaf(None, 5)) == {(): 5}
    assert count(Cat((Leaf("a", 3), Leaf("a", 3), Leaf(None, 2)))) == {("a",): 2, (): 2}
    assert count(Prod((Leaf("b", 3), Cat((Leaf("a", 2), Leaf(None, 4)))))) == {("a", "b"): 1, ("b",): 4}
    assert count(Both(Prod((Leaf("a", 2), Leaf(None, 3))), Leaf("f", 6))) == {(nested("f"),): 1}
    assert count(Both(Leaf(None, 6), Leaf("f", 6))) == {("f",): 1}  # nested in nothing


def test_a_nested_group_on_both_sides_is_refused() -> None:
    term = Both(Leaf("a", 2), Leaf("f", 2))
    axis = Axis("w", 0, term)
    groups = tuple(Group(name, 2, "input", (axis,), (), (axis,)) for name in ("a", "f"))
    graph = Graph({"w": (term, term)}, groups, tensors={"w": Stored((2, 2), 4, True)})
    with pytest.raises(AssertionError, match="nested"):
        _ = Cost(graph).whole


@given(st.integers(0, 2**9 - 1))
@settings(max_examples=40, deadline=None)
def test_rows_of_parts_add_up_to_the_whole(state: int) -> None:
    model, args = tiny("chain")
    cost = Cost(analyse(model, args))
    assume(cost.units == 9)
    open_ = torch.tensor([float(state >> k & 1) for k in range(9)], dtype=torch.float64)
    parts = cost.rows(
        (Row(m, layer), lambda t, at=layer: t.startswith(at)) for m in MEASURES for layer in ("0", "2", "3")
    )
    assert parts(open_).view(3, 3).sum(1).tolist() == pytest.approx(cost.whole(open_).tolist())


# ---- the papers' counting --------------------------------------------------------------------------------------------


def density(cost: Cost, units: dict[str, Tensor]) -> float:
    return cost.rows([(Row("density"), lambda tensor: True)])(cost.flat(units)).item()


def some(size: int, kept: int) -> Tensor:
    return torch.arange(size) < kept


def test_density_of_lenet_5_by_hand() -> None:
    """Seed 001's LeNet-5-Caffe, 20-50-800-500: maps own convolution weights, inputs own those of linear layers."""
    net = nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip
    cost = Cost(analyse(net, images(1, 28)()))
    assert cost.graph.sizes == {"0": 20, "3": 50, "7.inputs": 800, "7": 500}
    dense = 20 * 25 + 50 * 500 + 800 * 500 + 500 * 10
    assert dense == 430_500
    # The architecture 20-25-45-462 of 001's table: of its inputs, 45 are open.
    units = {"0": some(20, 20), "3": some(50, 25), "7.inputs": some(800, 45), "7": some(500, 462)}
    assert density(cost, units) == pytest.approx((20 * 25 + 25 * 500 + 45 * 500 + 462 * 10) / dense, rel=1e-12)
    # Removing conv2's maps alone credits nothing at fc1, in the papers' counting; in ours it does.
    units = {"0": some(20, 20), "3": some(50, 25), "7.inputs": some(800, 800), "7": some(500, 500)}
    assert density(cost, units) == pytest.approx(1 - 25 * 500 / dense, rel=1e-12)
    assert cost.of(Keep(cost.graph, units))["params"] == 431_080 - 25 * 501 - 400 * 500


def test_density_of_the_mlp_by_hand() -> None:
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    cost = Cost(analyse(net, images(1, 28)()))
    assert cost.graph.sizes == {"1.inputs": 784, "1": 300, "3": 100}
    units = {"1.inputs": some(784, 219), "1": some(300, 214), "3": some(100, 100)}
    dense = 784 * 300 + 300 * 100 + 100 * 10
    assert density(cost, units) == pytest.approx((219 * 300 + 214 * 100 + 1000) / dense, rel=1e-12)
    # And the exact count, of the small network: 219-214-100-10 with its biases.
    assert cost.of(Keep(cost.graph, units))["params"] == 219 * 214 + 214 + 214 * 100 + 100 + 1000 + 10


def test_density_of_single_weights_is_their_fraction() -> None:
    cost = Cost(analyse(mlp(), images(1, 4)(), units="weights"))
    units = {"1.weight": some(192, 19), "3.weight": some(120, 60), "5.weight": some(40, 1)}
    assert density(cost, units) == pytest.approx(80 / 352, rel=1e-12)


def test_density_of_nothing_is_nothing() -> None:
    cost = Cost(analyse(nn.Linear(3, 2), vectors(3)(), units="groups"))
    assert density(cost, {}) == 0
