"""Unifying against a simulation: what every position of every axis is, before and after."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunus.graph.unify import (
    CLASH,
    Reason,
    Var,
    atoms,
    concatenation,
    find,
    freeze,
    product,
    split_cat,
    split_product,
    unify,
)

Place = frozenset[tuple[int, int]]  # the atoms that act at a position, each with its index
BIG = 300  # positions of the longest axis tried


def places(var: Var) -> list[Place]:
    """For every position of an axis, which atom's which index stands there: plain recursion over the structure."""
    root = find(var)
    if root.factors is not None:
        result: list[Place] = [frozenset()]
        for factor in root.factors:
            inner = places(factor)
            result = [a | b for a in result for b in inner]
        return result
    if root.segments is not None:
        return [place for segment in root.segments for place in places(segment)]
    if root.size == 1:
        return [frozenset()]
    return [frozenset([(id(root), k)]) for k in range(root.size)]


def is_frozen(var: Var) -> bool:
    return all(atom.reasons for atom in atoms(var) if atom.size > 1)


class Soup:
    """Random axes made of shared atoms by products and concatenations, and the classes of positions they imply."""

    def __init__(self, seed: int, concatenate: bool = True) -> None:
        self.draw = random.Random(seed)
        self.concatenate = concatenate
        self.atoms = [Var(self.draw.choice([1, 2, 2, 3, 4, 6, 8, 12])) for _ in range(self.draw.randint(2, 5))]

    def axis(self, depth: int = 2) -> Var:
        kind = self.draw.random()
        if depth == 0 or kind < 0.25:
            return self.draw.choice(self.atoms)
        parts = [self.axis(depth - 1) for _ in range(self.draw.randint(2, 3))]
        made = product(parts) if kind < 0.7 or not self.concatenate else concatenation(parts)
        return made if made.size <= BIG else parts[0]

    def partner(self, var: Var) -> Var:
        """Another axis of the same length: of fresh atoms, of the soup's, or a regrouping."""
        size = find(var).size
        for _ in range(30):
            other = self.axis()
            if other.size == size:
                return other
        divisors = [d for d in range(2, size) if size % d == 0]
        kind = self.draw.random()
        if kind < 0.4 and divisors:
            d = self.draw.choice(divisors)
            return product([Var(d), Var(size // d)])
        if kind < 0.8 and size > 1 and self.concatenate:
            cut = self.draw.randint(1, size - 1)
            return concatenation([Var(cut), Var(size - cut)])
        return Var(size)


@given(st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_unifying_makes_two_axes_one_and_keeps_everything_else_true(seed: int) -> None:
    soup = Soup(seed)
    axes = [soup.axis() for _ in range(3)]
    for _ in range(4):
        one = soup.draw.choice(axes)
        axes.append(soup.partner(one))
        two = axes[-1]
        watched = [*axes, *soup.atoms]
        sizes = [find(var).size for var in watched]
        before = [(places(var), [(id(find(a)), a) for a in atoms(var)]) for var in watched]
        alive = [a for _, row in before for _, a in row]  # keeps the ids of old atoms from being used again
        ok = unify(one, two)
        assert [find(var).size for var in watched] == sizes
        assert [len(places(var)) for var in watched] == sizes
        if ok:
            assert places(one) == places(two)
        else:
            assert is_frozen(one)
            assert is_frozen(two)
        # Every old atom's index is now some set of new ones, and every axis is still made of the same indices.
        now = {id(atom): places(atom) for atom in alive}
        for var, (old, _) in zip(watched, before, strict=True):
            assert places(var) == [frozenset().union(*(now[key][k] for key, k in place)) for place in old]


@given(st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_nothing_is_made_one_that_was_not_said_to_be(seed: int) -> None:
    """Positions of disjoint axes that end in the same place must be linked through the equalities stated."""
    soup = Soup(seed)
    one = soup.axis()
    two = soup.partner(one)
    leaves = list({id(a): a for a in [*atoms(one), *atoms(two)]}.values())
    linked = {(id(a), k): (id(a), k) for a in leaves for k in range(a.size)}

    def root(key: tuple[int, int]) -> tuple[int, int]:
        while linked[key] != key:
            key = linked[key]
        return key

    # Two units must go together if positions made one hold them: a position goes when any of its units goes.
    for a, b in zip(places(one), places(two), strict=True):
        units = sorted(a | b)
        for unit in units[1:]:
            linked[root(unit)] = root(units[0])
    if not unify(one, two):
        return
    same: dict[Place, tuple[int, int]] = {}
    for a in leaves:
        for k, place in enumerate(places(a)):
            if place:
                assert root((id(a), k)) == root(same.setdefault(place, (id(a), k)))


@given(st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_saying_it_again_changes_nothing(seed: int) -> None:
    soup = Soup(seed, concatenate=False)
    one = soup.axis()
    two = soup.partner(one)
    if unify(one, two):
        before = places(one)
        assert unify(two, one)
        assert places(one) == before == places(two)


@given(st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_splits_hold_the_positions_they_were_made_of(seed: int) -> None:
    soup = Soup(seed)
    var = soup.axis()
    size = find(var).size
    first = soup.draw.choice([d for d in range(1, size + 1) if size % d == 0])
    parts = split_product(var, first)
    if parts is not None:
        assert (find(parts[0]).size, find(parts[1]).size) == (first, size // first)
        assert places(product(list(parts))) == places(var)
    if size > 1:
        cut = soup.draw.randint(1, size - 1)
        halves = split_cat(var, cut)
        if halves is not None:
            assert [find(half).size for half in halves] == [cut, size - cut]
            assert places(concatenation(list(halves))) == places(var)


def test_a_product_is_row_major() -> None:
    maps, pixels = Var(2), Var(3)
    flat = Var(6)
    assert unify(flat, product([maps, pixels]))
    assert places(flat)[4] == frozenset([(id(find(maps)), 1), (id(find(pixels)), 1)])


def test_products_refine_each_other() -> None:
    a, b = product([Var(4), Var(6)]), product([Var(8), Var(3)])
    assert unify(a, b)
    assert [atom.size for atom in atoms(a)] == [4, 2, 3] == [atom.size for atom in atoms(b)]


def test_a_square_read_both_ways_ties_its_factors() -> None:
    two, four = Var(2), Var(4)
    assert unify(product([two, four]), product([four, two]))
    assert [atom.size for atom in atoms(four)] == [2, 2]
    assert len({id(atom) for atom in [*atoms(four), *atoms(two)]}) == 1


def test_concatenations_split_where_either_is_cut() -> None:
    a, b = concatenation([Var(3), Var(5)]), concatenation([Var(4), Var(4)])
    assert unify(a, b)
    assert [atom.size for atom in atoms(a)] == [3, 1, 4] == [atom.size for atom in atoms(b)]


def test_a_concatenation_of_flattened_maps_is_a_product() -> None:
    one, two, pixels = Var(2), Var(3), Var(4)
    flat = concatenation([product([one, pixels]), product([two, Var(4)])])
    outer, inner = split_product(flat, 5) or pytest.fail("it splits")
    assert [atom.size for atom in atoms(outer)] == [2, 3]
    assert find(inner) is find(pixels)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (product([Var(4), Var(6)]), product([Var(6), Var(4)])),
        lambda: (product([Var(2), Var(3)]), concatenation([Var(1), Var(5)])),
        lambda: (product([Var(3), Var(5)]), product([Var(5), Var(3)])),
    ],
    ids=["neither divides", "cut within a row", "coprime"],
)
def test_a_clash_freezes_both(make: object) -> None:
    one, two = make()  # type: ignore[operator]
    reason = Reason("aten.add.Tensor", "layer1")
    assert not unify(one, two, reason)
    for var in (one, two):
        assert is_frozen(var)
        assert all(reason in atom.reasons for atom in atoms(var))


def test_a_clash_names_itself_where_nobody_else_does() -> None:
    one, two = product([Var(4), Var(6)]), product([Var(6), Var(4)])
    assert not unify(one, two)
    assert atoms(one)[0].reasons == [CLASH]


def test_reasons_are_handed_on() -> None:
    reason, other = Reason("a", ""), Reason("b", "")
    frozen, free = Var(6), Var(6)
    freeze(frozen, reason)
    freeze(frozen, reason)
    assert frozen.reasons == [reason]
    unify(frozen, product([Var(2), Var(3)]))
    assert all(atom.reasons == [reason] for atom in atoms(frozen))
    unify(free, frozen)
    freeze(free, other)
    assert all(atom.reasons == [reason, other] for atom in atoms(frozen))


def test_axes_of_one_position_say_nothing() -> None:
    assert unify(Var(1), Var(1))
    assert product([Var(1), Var(1)]).size == 1
    only = Var(5)
    assert product([Var(1), only, Var(1)]) is only
    assert concatenation([only]) is only


def test_axes_of_different_lengths_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="axes of 2 and 3 positions"):
        unify(Var(2), Var(3))


def test_long_chains_of_references_are_followed() -> None:
    chain = [Var(3) for _ in range(2000)]
    for a, b in pairwise(chain):
        unify(a, b)
    assert {id(find(var)) for var in chain} == {id(chain[-1])}
    assert find(chain[0]) is chain[-1]
