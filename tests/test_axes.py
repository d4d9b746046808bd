"""Terms against a plain loop over positions; Keep, its closure, and terms as JSON, also from strangers."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prunus.axes import Axis, Graph, Group, Keep
from prunus.errors import ArtefactError, ModelError
from prunus.terms import Both, Cat, Leaf, Prod, Term, factors, from_json, groups_of, leaves, owners, spread, to_json

SIZES = {"a": 2, "b": 3, "c": 1, "d": 4}


def leaf() -> st.SearchStrategy[Leaf]:
    free = st.integers(1, 3).map(lambda size: Leaf(None, size))
    return st.one_of(st.sampled_from(sorted(SIZES.items())).map(lambda item: Leaf(*item)), free)


def over(base: Term) -> Term:
    return Both(base, Leaf("fine", base.size))


def terms(depth: int = 3) -> st.SearchStrategy[Term]:
    def larger(inner: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
        parts = st.lists(inner, min_size=1, max_size=3).map(tuple)
        return st.one_of(parts.map(Prod), parts.map(Cat)).filter(lambda term: term.size < 400)

    return st.recursive(leaf(), larger, max_leaves=6)


def slow_places(term: Term) -> list[list[tuple[str, int]]]:
    """For every position the units that act there, by plain loops."""
    if isinstance(term, Leaf):
        return [[] if term.group is None else [(term.group, k)] for k in range(term.size)]
    if isinstance(term, Both):
        return [a + b for a, b in zip(slow_places(term.base), slow_places(term.fine), strict=True)]
    if isinstance(term, Cat):
        result = []
        for segment in term.segments:
            result += slow_places(segment)
        return result
    result = [[]]
    for factor in term.factors:
        result = [a + b for a in result for b in slow_places(factor)]
    return result


def values_for(term: Term, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {named.group: named.size for named in leaves(term) if named.group is not None}
    return {name: torch.rand(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}


@given(terms(), st.booleans(), st.integers(0, 100))
@settings(max_examples=150, deadline=None)
def test_factors_and_spread_equal_a_plain_loop(term: Term, fine: bool, seed: int) -> None:
    term = over(term) if fine else term
    values = values_for(term, seed)
    offsets, start = {}, 7
    for name in sorted(values, reverse=True):
        offsets[name] = start
        start += values[name].numel() + 2
    found = factors(term, offsets, one=-5)
    wanted = slow_places(term)
    assert found.shape[1] == len(wanted) == term.size
    for k, place in enumerate(wanted):
        assert sorted(n for n in found[:, k].tolist() if n != -5) == sorted(
            offsets[name] + unit for name, unit in place
        )
    laid = spread(term, values).tolist()
    for got, place in zip(laid, wanted, strict=True):
        product = 1.0
        for name, unit in place:
            product *= values[name][unit].item()
        assert got == pytest.approx(product, rel=1e-12)


@given(terms(), st.sampled_from(sorted(SIZES)))
@settings(max_examples=80, deadline=None)
def test_owners_equal_a_plain_loop(term: Term, group: str) -> None:
    wanted = [max([unit for name, unit in place if name == group], default=-1) for place in slow_places(term)]
    assert owners(term, group).tolist() == wanted


@given(terms())
@settings(max_examples=80, deadline=None)
def test_a_boolean_stays_one(term: Term) -> None:
    masks = {name: values > 0.5 for name, values in values_for(term, 3).items()}
    wanted = [all(bool(masks[name][unit]) for name, unit in place) for place in slow_places(term)]
    assert spread(term, masks).bool().tolist() == wanted


# ---- JSON ------------------------------------------------------------------------------------------------------------


@given(terms(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_terms_survive_json(term: Term, fine: bool) -> None:
    term = over(term) if fine else term
    assert from_json(json.loads(json.dumps(to_json(term)))) == term


def nest(depth: int) -> Any:
    value: Any = ["leaf", None, 1]
    for _ in range(depth):
        value = ["prod", value]
    return value


HOSTILE = [
    None, 3, "leaf", {}, [], [[]], ["leaf"], ["leaf", "a"], ["leaf", "a", 0], ["leaf", "a", -1], ["leaf", "a", 1.0],
    ["leaf", "a", "3"], ["leaf", "a", True], ["leaf", "a", 2**40], ["leaf", 3, 3], ["leaf", ["a"], 3],
    ["leaf", "a", 3, 4], ["prod"], ["cat"], ["prod", 3], ["cat", ["leaf", "a", 2], None], ["tensor", ["leaf", "a", 2]],
    [["leaf"], "a", 2],
    ["both", ["leaf", "a", 2]], ["both", ["leaf", "a", 2], ["leaf", "b", 3]],
    ["both", ["leaf", "a", 2], ["prod", ["leaf", "b", 2]]], ["both", ["leaf", "a", 2], ["leaf", None, 2]],
    ["__import__", "os", 2], nest(33), nest(900), float("nan"), ["leaf", "a", float("inf")],
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE, ids=[str(k) for k in range(len(HOSTILE))])
def test_other_json_is_refused(value: Any) -> None:
    with pytest.raises(ArtefactError, match="not written as Prunus writes axes"):
        from_json(value)


def test_as_deep_as_models_go_is_read() -> None:
    assert from_json(nest(32)).size == 1


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(anything)
@settings(max_examples=100, deadline=None)
def test_any_json_is_read_or_refused(value: Any) -> None:
    try:
        term = from_json(value)
    except ArtefactError:
        return
    assert to_json(term) == value


# ---- Keep ------------------------------------------------------------------------------------------------------------


def group(name: str, size: int, *consumers: Axis, unit: str = "map") -> Group:
    return Group(name, size, unit, consumers, (), consumers)


def plain() -> Graph:
    return Graph({}, (group("a", 3), group("b", 2)))


def lenet_like() -> Graph:
    """Two maps of three pixels, read by a layer with finer inputs; two inputs more are beside them."""
    term = Both(Cat((Prod((Leaf("maps", 2), Leaf(None, 3))), Leaf(None, 2))), Leaf("fc.inputs", 8))
    axis = Axis("fc.weight", 1, term)
    return Graph(
        {"conv.weight": (Leaf("maps", 2), Leaf(None, 1)), "fc.weight": (Leaf(None, 4), term)},
        (group("maps", 2, axis), group("fc.inputs", 8, axis, unit="input")),
    )


def bits(text: str) -> Tensor:
    return torch.tensor([c == "1" for c in text])


def test_a_keep_without_a_word_keeps_all() -> None:
    assert Keep(plain(), {}).kept() == {"a": [0, 1, 2], "b": [0, 1]}
    assert Keep(plain(), {"b": torch.tensor([0.0, 0.3])}).kept() == {"a": [0, 1, 2], "b": [1]}


def test_a_keep_of_another_model_is_refused() -> None:
    with pytest.raises(ModelError, match="the group 'c', which this model does not have"):
        Keep(plain(), {"c": bits("1")})
    with pytest.raises(ModelError, match=r"'a' has shape \(2,\); it has 3 units"):
        Keep(plain(), {"a": bits("11")})
    with pytest.raises(ModelError, match=r"has shape \(3, 1\)"):
        Keep(plain(), {"a": bits("111")[:, None]})
    with pytest.raises(ModelError, match="'b' keeps no unit; at least one must stay"):
        Keep(plain(), {"b": bits("00")})


def test_keeps_are_equal_by_what_they_keep() -> None:
    one, other = Keep(plain(), {"a": bits("101")}), Keep(plain(), {"a": bits("101"), "b": bits("11")})
    assert one == other
    assert one != Keep(plain(), {})
    assert one != {"a": [0, 2], "b": [0, 1]}
    with pytest.raises(TypeError):
        hash(one)


def test_indices_make_the_same_keep() -> None:
    keep = Keep(plain(), {"a": bits("101"), "b": bits("01")})
    assert Keep.of_indices(plain(), keep.kept()) == keep
    assert Keep.of_indices(plain(), {"a": [2, 0]}).kept() == {"a": [0, 2], "b": [0, 1]}


@pytest.mark.parametrize(
    "indices", [[3], [-1], [0, 2.0], [True], ["0"], [None], [], 3, None, "01", {"0": 1}, [[0]], 1.5, [2**70]]
)
def test_indices_from_a_stranger_are_refused(indices: Any) -> None:
    with pytest.raises(ArtefactError, match="'a'"):
        Keep.of_indices(plain(), {"a": indices})


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(ArtefactError, match="the group 'z'"):
        Keep.of_indices(plain(), {"z": [0]})


def test_a_graph_finds_its_groups() -> None:
    assert plain().sizes == {"a": 3, "b": 2}
    assert plain().group("b").size == 2
    with pytest.raises(KeyError):
        plain().group("c")


def test_closing_removes_what_nobody_reads() -> None:
    graph = lenet_like()
    assert str(graph.groups[0].consumers[0]) == "fc.weight[1]"

    def closed(maps: str, fine: str) -> dict[str, list[int]]:
        return Keep(graph, {"maps": bits(maps), "fc.inputs": bits(fine)}).closed().kept()

    assert closed("11", "11111111") == {"maps": [0, 1], "fc.inputs": [*range(8)]}
    assert closed("10", "11111111") == {"maps": [0], "fc.inputs": [0, 1, 2, 6, 7]}  # finer units go with their base
    assert closed("11", "00010010") == {"maps": [1], "fc.inputs": [3, 6]}  # a base goes when it is not read
    assert closed("10", "01010000") == {"maps": [0], "fc.inputs": [1]}


def test_closing_leaves_every_group_a_unit() -> None:
    """All that is read lies beside the maps: one of them stays, unread, for no layer can be empty."""
    keep = Keep(lenet_like(), {"fc.inputs": bits("00000011")})
    assert keep.closed().kept() == {"maps": [0], "fc.inputs": [6, 7]}
    keep = Keep(lenet_like(), {"maps": bits("01"), "fc.inputs": bits("00000011")})
    assert keep.closed().kept() == {"maps": [1], "fc.inputs": [6, 7]}


def test_a_keep_whose_closure_is_empty_is_refused() -> None:
    keep = Keep(lenet_like(), {"maps": bits("10"), "fc.inputs": bits("00010000")})
    with pytest.raises(ModelError, match=r"'fc.inputs' keeps no unit"):
        keep.closed()


@given(st.integers(1, 3), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_closing_twice_is_closing_once(maps: int, fine: int) -> None:
    keep = Keep(lenet_like(), {"maps": bits(f"{maps:02b}"), "fc.inputs": bits(f"{fine:08b}")})
    try:
        closed = keep.closed()
    except ModelError:
        return
    assert closed.closed() == closed
    # By hand: a position is read where its gate and its map are open; a map stays while a position of it is read.
    read = [k for k in range(8) if keep.units["fc.inputs"][k] and (k > 5 or keep.units["maps"][k // 3])]
    assert closed.kept()["fc.inputs"] == read
    assert closed.kept()["maps"] == (sorted({k // 3 for k in read if k < 6}) or keep.kept()["maps"][:1])


def test_positions_are_where_a_keep_leaves_something() -> None:
    graph = lenet_like()
    keep = Keep(graph, {"maps": bits("01"), "fc.inputs": bits("11101110")})
    term = graph.axes["fc.weight"][1]
    assert keep.positions(term).tolist() == bits("00001110").tolist()
    assert keep.positions(Leaf(None, 3)).tolist() == [True] * 3
    assert groups_of(term) == {"maps", "fc.inputs"}
