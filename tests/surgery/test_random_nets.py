"""On random architectures: what the analysis calls free is removed exactly, and a planted error does not pass."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_nets import RandomNet
from torch import Tensor, nn

import prunus.surgery.slicing as slicing
from prunus.axes import Axis, Graph, Keep
from prunus.cost import Cost
from prunus.errors import ModelError
from prunus.graph import analyse
from prunus.measure import count_bytes, count_macs, count_params
from prunus.surgery import mask_sites, prove, slice_model
from prunus.surgery.verify import Inputs, outputs

seeds = st.integers(0, 10**6)
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]  # explaining traces every line of torch.export


def random_keep(graph: Graph, seed: int) -> Keep:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        units = {}
        for name, size in graph.sizes.items():
            units[name] = torch.rand(size, generator=generator) < 0.3 + 0.6 * torch.rand(1, generator=generator)
            units[name][int(torch.randint(size, (1,), generator=generator))] = True
        try:
            return Keep(graph, units).closed()
        except ModelError:  # all finer units that were drawn lie under removed ones
            continue
    return Keep(graph, {})


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def largest(these: list[Tensor], those: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(these, those, strict=True))


def error_and_effect(model: nn.Module, graph: Graph, keep: Keep, x: Tensor) -> tuple[float, float, float]:
    inputs = Inputs.of(x)
    whole = outputs(model, inputs)
    masked = outputs(model, inputs, mask_sites(graph, keep, tensors(model)))
    small = outputs(slice_model(model, graph, keep), inputs)
    assert [a.shape for a in small] == [a.shape for a in whole]
    return largest(masked, small), largest(whole, masked), max(a.abs().max().item() for a in whole)


def check_one(seed: int) -> str:
    net = RandomNet(seed).double().eval()
    x = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    graph = analyse(net, (x,))
    if not graph.groups:
        return "no groups"
    assert prove(net, graph, x) == graph  # there are no literals in it: nothing may be refused
    cost, kinds = Cost(graph), set()
    for k in range(3):
        keep = random_keep(graph, seed + k)
        error, effect, scale = error_and_effect(net, graph, keep, x)
        assert error <= max(1e-9 * effect, 1e-14 * scale), (seed, k, error, effect)
        kinds.add("removed" if effect > 1e-9 * scale else "vacuous")
        small = slice_model(net, graph, keep)
        counted = {"params": count_params(small), "macs": count_macs(small, (x,)), "bytes": count_bytes(small)}
        assert cost.of(keep) == counted
    return "removed" if "removed" in kinds else "vacuous"


@given(seeds)
@settings(max_examples=30, deadline=None, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_free_is_removed_exactly(seed: int) -> None:
    check_one(seed)


def test_the_property_is_not_empty() -> None:
    """Of fixed seeds, nearly all have something to remove, and removing it changes the outputs."""
    kinds = Counter(check_one(seed) for seed in range(20))
    assert kinds["removed"] >= 18, kinds


@pytest.mark.slow
def test_what_is_free_is_removed_exactly_at_length() -> None:
    kinds = Counter(check_one(seed) for seed in range(1000, 1600))
    assert kinds["removed"] >= 570, kinds


def shift_one_consumer(monkeypatch: pytest.MonkeyPatch, tensor: str, dim: int) -> None:
    """Plant an error: one reading axis keeps the units one further on."""
    right = slicing.kept_indices

    def wrong(graph: Graph, keep: Keep) -> dict[str, list[Tensor | None]]:
        result = right(graph, keep)
        index, size = result[tensor][dim], graph.axes[tensor][dim].size
        if index is not None:
            result[tensor][dim] = ((index + 1) % size).sort().values
        return result

    monkeypatch.setattr(slicing, "kept_indices", wrong)


def shifted(model: nn.Module, graph: Graph, keep: Keep, axis: Axis, x: Tensor) -> list[Tensor]:
    """What the planted error computes, at full size: the kept places of one consumer hold the next ones' weights."""
    weights = mask_sites(graph, keep, tensors(model))
    index = keep.positions(axis.term).nonzero().flatten()
    following = ((index + 1) % axis.term.size).sort().values
    wrong = tensors(model)[axis.tensor].detach().index_select(axis.dim, following)
    weights[axis.tensor] = weights[axis.tensor].detach().index_copy(axis.dim, index, wrong)
    return outputs(model, Inputs.of(x), weights)


def planted(monkeypatch: pytest.MonkeyPatch, seed: int) -> Counter[str]:
    """Every group's every consumer in turn: is the planted error seen, and is it what it must be?"""
    found: Counter[str] = Counter()
    net = RandomNet(seed).double().eval()
    x = torch.randn(2, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    graph = analyse(net, (x,), units="groups")
    for group in graph.groups:
        keep = Keep(graph, {group.name: torch.arange(group.size) < max(1, group.size // 2)})
        right = outputs(net, Inputs.of(x), mask_sites(graph, keep, tensors(net)))
        for axis in group.consumers:
            wanted = largest(right, shifted(net, graph, keep, axis, x))
            with monkeypatch.context() as patch:
                shift_one_consumer(patch, axis.tensor, axis.dim)
                error, effect, scale = error_and_effect(net, graph, keep, x)
            assert error == pytest.approx(wanted, rel=1e-7, abs=1e-12)
            if effect <= 1e-9 * scale or wanted <= 1e-12 * scale:
                found["vacuous"] += 1  # nothing hangs on these units: dead, or not used
            else:
                found["seen" if error > 1e-7 * effect else "missed"] += 1
    return found


def test_a_planted_error_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sum((planted(monkeypatch, seed) for seed in range(12)), Counter())
    assert found["seen"] >= 50, found
    assert found["vacuous"] <= found["seen"] // 3, found
    assert found["missed"] == 0, found


def test_proving_sees_a_planted_error_and_names_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = named = 0
    for seed in range(12):
        net = RandomNet(seed).double().eval()
        x = torch.randn(2, 2, 8, 8, dtype=torch.float64)
        graph = analyse(net, (x,), units="groups")
        for group in graph.groups:
            if group.size < 4 or len(group.consumers) != 1:
                continue
            axis = group.consumers[0]
            with monkeypatch.context() as patch:
                shift_one_consumer(patch, axis.tensor, axis.dim)
                proven = prove(net, graph, x)
            tried += 1
            gone = set(graph.sizes) - set(proven.sizes)
            assert gone <= {g.name for g in graph.groups if axis in g.consumers}
            assert all(any(f.axis == str(graph.group(name).members[0]) for f in proven.frozen) for name in gone)
            named += bool(gone)
    assert tried >= 8
    assert named >= tried - 2  # of dead units nobody can tell
