"""On random graphs of maps and tokens: whatever is called free is removed exactly, in both forms, and counted."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_graphs import MAPS, TOKENS, RandomGraph
from random_nets import RandomNet
from test_random_nets import random_keep, tensors

from prunus.cost import Cost
from prunus.graph import analyse
from prunus.measure import count_bytes, count_macs, count_params
from prunus.surgery import Exported, Inputs, mask_sites, outputs, prove, slice_model
from prunus.surgery.verify import max_rel_diff

EVERYTHING = ("structured", "head_dims", "width")
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]  # explaining traces every line of torch.export


def check_one(seed: int, keeps: int = 2) -> Counter[str]:
    """Removals in the graph form, and in the form that proving chooses; says what there was to remove."""
    net = RandomGraph(seed).double().eval()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    inputs = Inputs.of(x)
    graph = analyse(net, (x,), units=EVERYTHING)
    found = Counter(group.unit for group in graph.groups)
    if not graph.groups:
        return found
    proven = prove(net, graph, x)
    refused = [f for f in proven.frozen if f not in graph.frozen]
    assert proven.sizes == graph.sizes, (seed, refused)
    exported, cost, whole = Exported(net, inputs, training=False), Cost(graph), outputs(net, inputs)
    for k in range(keeps):
        keep = random_keep(graph, seed + k)
        masked = outputs(net, inputs, mask_sites(graph, keep, tensors(net)))
        for form in {"graph", proven.form}:
            small = slice_model(net, graph, keep, form=form)
            small = exported.shrunk(graph, keep, small) if form == "graph" else small
            error = max_rel_diff(masked, outputs(small, inputs))
            assert error <= 1e-9, (seed, k, form, error)
            counted = {"params": count_params(small), "macs": count_macs(small, (x,)), "bytes": count_bytes(small)}
            assert cost.of(keep) == counted, (seed, k, form)
        found["removed" if max_rel_diff(whole, masked) > 1e-6 else "vacuous"] += 1
    found[f"in {proven.form} form"] += 1
    return found


@given(st.integers(0, 10**6))
@settings(max_examples=4, deadline=None, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_free_is_removed_exactly(seed: int) -> None:
    check_one(seed)


def test_the_property_is_not_empty() -> None:
    """Of fixed seeds: units of every kind, both forms, and removals that change the outputs."""
    found = sum((check_one(seed) for seed in range(6)), Counter())
    assert {"map", "neuron", "head", "head dim", "width", "in eager form", "in graph form"} <= set(found)
    assert found["vacuous"] <= found["removed"] // 5, found


def test_every_kind_of_step_is_drawn() -> None:
    drawn = Counter(step[0] for seed in range(150) for step in RandomGraph(seed).program)
    steps = {"norm of maps", "module", "act", "add", "cat", "chunk", "split", "cut", "shuffle", "pool", "excite", "pad"}
    steps |= {"enlarge", "weigh", "tokens", "root_mean", "glu", "gated", "attend"}
    assert set(drawn) == steps
    assert min(drawn.values()) >= 5
    assert all(hasattr(RandomGraph, f"_{kind}") for kind in [*MAPS, *TOKENS])


def check_maps(seed: int) -> None:
    """The other generator's networks, in the graph form."""
    net = RandomNet(seed).double().eval()
    x = torch.randn(2, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    graph, exported = analyse(net, (x,), units=EVERYTHING), Exported(net, Inputs.of(x), training=False)
    keep = random_keep(graph, seed)
    masked = mask_sites(graph, keep, tensors(net))
    small = exported.shrunk(graph, keep, slice_model(net, graph, keep, form="graph"))
    for batch in (2, 1, 3):
        one = Inputs.of(torch.randn(batch, 2, 8, 8, dtype=torch.float64))
        assert max_rel_diff(outputs(net, one, masked), outputs(small, one)) <= 1e-9, (seed, batch)


def test_the_other_generators_networks_as_operations() -> None:
    for seed in range(5):
        check_maps(seed)


@pytest.mark.slow
def test_the_other_generators_networks_as_operations_at_length() -> None:
    for seed in range(1000, 1400):
        check_maps(seed)


@pytest.mark.slow
def test_what_is_free_is_removed_exactly_at_length() -> None:
    found = sum((check_one(seed) for seed in range(1000, 1400)), Counter())
    assert found["vacuous"] <= found["removed"] // 10, found
