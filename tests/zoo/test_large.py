"""Models of real size: analysed in seconds, without their weights where there are none."""

import resource
import time
from collections import Counter

import pytest
import zoo_large

import prunus
from prunus.cost import Cost
from prunus.errors import ModelError
from prunus.graph import analyse
from prunus.measure import total_macs
from prunus.surgery import Inputs


def test_a_llama_of_a_billion_parameters_is_analysed_without_its_weights() -> None:
    model, example = zoo_large.llama_1b_meta()
    inputs = Inputs.of(example)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    graph = analyse(model, inputs.args, inputs.kwargs, units=("structured", "head_dims", "width", "branches"))
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kilobytes
    assert seconds < 30
    assert grown < 1_000_000  # its weights are 4.9 GB
    units = Counter(group.unit for group in graph.groups)
    assert units == {"head": 32, "neuron": 16, "head dim": 17, "width": 1, "branch": 32}
    sizes = Counter((group.unit, group.size) for group in graph.groups)
    assert sizes["head", 8] == 16  # key-value heads, each with its four query heads
    assert sizes["head", 4] == 16  # the first, second, third or fourth query head of every key-value head
    assert sizes["neuron", 8192] == 16
    assert sizes["width", 2048] == 1
    assert Cost(graph).dense()["params"] == sum(p.numel() for p in model.parameters()) == 1_235_814_400


def test_a_model_without_numbers_is_shown_but_not_gated() -> None:
    model, example = zoo_large.llama_1b_meta()
    with pytest.raises(ModelError, match="meta device"):
        prunus.gate(model, example)


@pytest.mark.parametrize(
    ("make", "units"),
    [
        (zoo_large.resnet50_real, {"map": 37, "branch": 16}),
        (zoo_large.vit_b16_real, {"head": 12, "neuron": 12, "branch": 24}),
    ],
)
def test_real_networks_are_analysed_in_seconds(make: object, units: dict[str, int]) -> None:
    model, example = make()  # type: ignore[operator]
    inputs = Inputs.of(example)
    start = time.perf_counter()
    graph = analyse(model, inputs.args, inputs.kwargs, units="structured,branches")
    assert time.perf_counter() - start < 10
    assert Counter(group.unit for group in graph.groups) == units
    batch = 1 if not inputs.args else inputs.args[0].shape[0]
    assert Cost(graph).dense()["macs"] == total_macs(model, inputs.args, inputs.kwargs) / batch
