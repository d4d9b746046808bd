"""Rows of polynomials against enumeration of all states and a plain loop over monomials."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from prunus import rows as module
from prunus.axes import Axis, Graph, Group
from prunus.rows import Polynomial, Rows, nested
from prunus.terms import Both, Leaf, Prod

SIZES = {"a": 2, "b": 3, "c": 2}
GRAPH = Graph({}, tuple(Group(name, size, "neuron", (), (), ()) for name, size in SIZES.items()))

polynomials = st.lists(
    st.dictionaries(
        st.lists(st.sampled_from(sorted(SIZES)), max_size=4).map(lambda names: tuple(sorted(names))),
        st.integers(1, 50).map(float),
        max_size=5,
    ),
    min_size=1,
    max_size=3,
)


def at(counts: dict[str, float], polynomial: Polynomial) -> float:
    """A polynomial's value at given counts."""
    return sum(c * prod(counts[name] for name in monomial) for monomial, c in polynomial.items())


def counts_of(open_: Tensor) -> dict[str, float]:
    parts = open_.split(list(SIZES.values()))
    return {name: float(part.sum()) for name, part in zip(SIZES, parts, strict=True)}


def expectation(p: Tensor, polynomial: Polynomial) -> float:
    """Over all states of independent gates."""
    total = 0.0
    for state in itertools.product((0.0, 1.0), repeat=len(p)):
        open_ = torch.tensor(state, dtype=torch.float64)
        total += float((open_ * p + (1 - open_) * (1 - p)).prod()) * at(counts_of(open_), polynomial)
    return total


@settings(max_examples=60, deadline=None)
@given(polynomials, st.integers(0, 1000), st.booleans())
def test_any_polynomials_of_any_degree(many: list[Polynomial], seed: int, sparse: bool) -> None:
    before, module.SMALL = module.SMALL, 0 if sparse else module.SMALL
    try:
        rows = Rows(GRAPH, many)
    finally:
        module.SMALL = before
    assert (rows.membership is None) == sparse
    p = torch.rand(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    wanted = [expectation(p, polynomial) for polynomial in many]
    assert rows(p).tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    open_ = (p > 0.5).double()
    exact = [at(counts_of(open_), polynomial) for polynomial in many]
    assert rows(open_).tolist() == exact  # to the bit: these are counts
    assert rows(torch.stack([p, open_])).tolist() == [pytest.approx(wanted, rel=1e-9, abs=1e-9), exact]
    assert gradcheck(rows, (p.requires_grad_(),), rtol=1e-5, atol=1e-4)


def test_a_nested_count_in_a_product_of_three() -> None:
    both = Both(Prod((Leaf("a", 2), Leaf(None, 2))), Leaf("f", 4))
    axis = Axis("w", 1, both)
    groups = (Group("a", 2, "map", (), (), ()), Group("f", 4, "input", (axis,), (), (axis,)))
    graph = Graph({"w": (Leaf(None, 3), both)}, (*groups, Group("b", 3, "neuron", (), (), ())))
    rows = Rows(graph, [{("b", "b", nested("f")): 2.0, (nested("f"),): 1.0}])
    p = torch.rand(9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    total = 0.0
    for state in itertools.product((0.0, 1.0), repeat=9):
        open_ = torch.tensor(state, dtype=torch.float64)
        n = sum(state[k // 2] * state[2 + k] for k in range(4))
        total += float((open_ * p + (1 - open_) * (1 - p)).prod()) * (2 * sum(state[6:]) ** 2 * n + n)
    assert rows(p).item() == pytest.approx(total, rel=1e-10)
    assert gradcheck(rows, (p.requires_grad_(),))


def test_large_counts_are_exact() -> None:
    big = Graph({}, (Group("a", 4, "map", (), (), ()), Group("b", 4, "map", (), (), ())))
    rows = Rows(big, [{("a", "b"): 2.0**45 + 1}])
    assert rows(torch.tensor([1, 1, 1, 0, 1, 1, 0, 0.0])).item() == 6 * (2**45 + 1)
