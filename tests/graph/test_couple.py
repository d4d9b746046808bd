"""The analysis against models whose groups can be told by hand."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from model_zoo import CASES, Branching, Case, Net, between_linear, images, lenet, residual, swirl, vectors
from torch import nn
from torch.nn import functional as F

from prunus.axes import Axis, Graph, Keep
from prunus.cost import Cost
from prunus.errors import ModelError
from prunus.graph import analyse, matches
from prunus.graph.rules import RULES
from prunus.measure import count_macs


def names(axes: Iterable[Axis]) -> list[str]:
    return sorted(map(str, axes))


def found(model: nn.Module, *args: Any, **options: Any) -> Graph:
    return analyse(model, args, **options)


def reasons(graph: Graph) -> set[tuple[str, str, str]]:
    return {(f.axis, f.operation, f.module) for f in graph.frozen}


def test_there_are_as_many_cases_as_were_written() -> None:
    assert len(CASES) == 46
    assert len({case.name for case in CASES}) == 46
    assert {case.units for case in CASES} == {"structured", "groups", "weights"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_are_exactly_those_told_by_hand(case: Case) -> None:
    graph = analyse(case.make(), case.args(), case.kwargs(), units=case.units)
    assert list(graph.sizes) == list(case.groups)
    for name, wanted in case.groups.items():
        group = graph.group(name)
        assert (group.size, group.unit) == (wanted.size, wanted.unit)
        assert names(group.members) == sorted(wanted.members.split())
        assert names(group.producers) == sorted(wanted.producers.split())
        assert names(group.consumers) == sorted(wanted.consumers.split())
    assert reasons(graph) == case.frozen
    assert len(graph.frozen) == len(case.frozen)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_terms_are_as_long_as_the_dimensions_they_describe(case: Case) -> None:
    model = case.make()
    graph = analyse(model, case.args(), case.kwargs(), units=case.units)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert set(graph.axes) == set(tensors) == set(graph.tensors)
    for name, terms in graph.axes.items():
        assert tuple(term.size for term in terms) == tuple(tensors[name].shape)
        assert graph.tensors[name].shape == tuple(tensors[name].shape)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = residual().train(training)
    model.get_submodule("bn1").eval()  # a frozen batch norm, as users have them
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    found(model, *images()())
    assert [module.training for module in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_unit_of_a_map_is_its_pixels_after_flattening() -> None:
    graph = found(lenet(), *images(1, 28)())
    base = graph.axes["fc1.weight"][1]
    assert [leaf.size for leaf in base.base.factors] == [7, 4, 4]  # type: ignore[union-attr]
    assert graph.selections == {"fc1": "fc1.inputs"}
    assert [w.positions[-1].size for w in graph.works] == [24, 8, 2, 2]  # pixels, then the batch


def test_grouped_convolutions_know_what_their_number_of_groups_counts() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1, groups=2), nn.Conv2d(4, 2, 1))
    graph = found(model, *images()())
    assert list(graph.split) == ["1"]
    assert graph.split["1"] == graph.axes["0.weight"][0].factors[0]  # type: ignore[union-attr]


def test_aliases_lead_to_the_first_name() -> None:
    model = between_linear(F.relu)()
    model.again = model.a  # type: ignore[assignment]
    graph = found(model, *vectors()())
    assert graph.aliases == {"again.weight": "a.weight", "again.bias": "a.bias"}
    assert "again.weight" not in graph.axes


# ---- what the user asks for ------------------------------------------------------------------------------------------


def test_only_and_freeze_choose_groups() -> None:
    def groups(**options: Any) -> list[str]:
        return list(found(lenet(), *images(1, 28)(), **options).sizes)

    assert groups() == ["conv1", "conv2", "fc1.inputs", "fc1"]
    assert groups(only=["conv*"]) == ["conv1", "conv2"]
    assert groups(only=["fc1"]) == ["fc1.inputs", "fc1"]
    assert groups(only=["fc1.inputs"]) == ["fc1.inputs"]
    assert groups(freeze_names=["conv2", "fc1.inputs"]) == ["conv1", "fc1"]
    assert groups(only=["conv*"], freeze_names=["conv1"]) == ["conv2"]
    assert groups(freeze_names=["*"]) == []


def test_a_frozen_group_is_reported_and_leaves_every_axis() -> None:
    graph = found(lenet(), *images(1, 28)(), freeze_names=["conv2"])
    assert ("conv2.weight[0]", "frozen by the user", "conv2") in reasons(graph)
    assert "group='conv2'" not in repr(graph.axes) + repr(graph.works) + repr(graph.groups)
    assert graph.axes["fc1.weight"][1].size == 112
    graph = found(lenet(), *images(1, 28)(), freeze_names=["fc1.inputs"])
    assert graph.selections == {}
    assert "fc1.inputs" not in repr(graph.axes)


def test_freezing_weights_by_name() -> None:
    graph = found(lenet(), *images(1, 28)(), units="weights", freeze_names=["fc1"])
    assert list(graph.scattered) == ["conv1.weight", "conv2.weight", "fc2.weight"]
    assert ("fc1.weight[0]", "frozen by the user", "fc1") in reasons(graph)


@pytest.mark.parametrize("option", ["only", "freeze_names"])
def test_a_pattern_that_names_nothing_is_refused(option: str) -> None:
    with pytest.raises(ModelError, match=r"No group matches 'conv11'; nearest: conv1"):
        found(lenet(), *images(1, 28)(), **{option: ["conv11"]})


def test_unknown_units_are_refused() -> None:
    with pytest.raises(ModelError, match="units='group' is not a kind of unit; nearest: groups"):
        found(lenet(), *images(1, 28)(), units="group")


def test_names_match_as_modules_do() -> None:
    assert matches("layer1.0.conv1#2", ["layer1.0"])
    assert matches("a#2", ["a"])
    assert matches("fc1.inputs", ["fc*"])
    assert not matches("layer10.conv", ["layer1"])


# ---- what cannot be taken --------------------------------------------------------------------------------------------


def test_a_branch_on_values_is_refused_plainly() -> None:
    with pytest.raises(ModelError, match="The model Branching cannot be exported") as caught:
        found(Branching(), *vectors()())
    assert "\n" not in str(caught.value)


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="cannot be exported on these example inputs"):
        found(lenet(), *images(2, 28)())


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ModelError, match=r"A model must be a torch.nn.Module; this is a function\."):
        found(lambda x: x, torch.ones(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(), nn.BatchNorm1d(3, affine=False)])
def test_what_has_no_parameters_is_refused(model: nn.Module) -> None:
    with pytest.raises(ModelError, match="has no parameters: there is nothing to shrink"):
        found(model, torch.ones(2, 3))


# ---- rules, one by one -----------------------------------------------------------------------------------------------

PASSES = {
    "relu_": lambda x: x.relu_(),
    "gelu": F.gelu,
    "clamp": lambda x: x.clamp(0, 1),
    "add a number": lambda x: 1 + x,
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "maximum": lambda x: torch.maximum(x, -x),
    "max of two": lambda x: torch.max(x, x * 2),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "clone": lambda x: x.clone().contiguous(),
    "to and back": lambda x: x.half().to(x.dtype),
    "type_as": lambda x: x.double().type_as(x),
    "detach": lambda x: x.detach(),
    "squeeze": lambda x: x.unsqueeze(0).unsqueeze(-1).squeeze(),
    "transpose twice": lambda x: x.transpose(-1, 0).swapaxes(0, 1),
    "t": lambda x: x.t().t(),
    "permute": lambda x: x.unsqueeze(1).permute(2, -2, 0).permute((-1, 1, 0)).squeeze(1),
    "split and join": lambda x: x.reshape(3, 2, 2, 2).flatten(1),
    "softmax over examples": lambda x: x.softmax(0),
    "sum over one": lambda x: x.unsqueeze(1).sum(1),
    "mean of stacked": lambda x: torch.cat([x.unsqueeze(1), x.unsqueeze(1)], 1).mean(1),
    "max over stacked": lambda x: torch.cat([x.unsqueeze(1), -x.unsqueeze(1)], 1).max(1).values,
    "variance over one dimension": lambda x: torch.cat([x.unsqueeze(1), -x.unsqueeze(1)], 1).var(1),
    "zeros_like": lambda x: x + torch.zeros_like(x),
    "pool": lambda x: F.avg_pool1d(x.unsqueeze(2), 1).squeeze(2),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "split": lambda x: torch.cat([x.split([3, 5], 1)[1], x.split([3, 5], 1)[0]], 1),
    "slice and join": lambda x: torch.cat([x[:, 4:], x[:, :4]], 1),
    "glu": lambda x: F.glu(torch.cat([x, x], 1), 1),
    "group norm": lambda x: F.group_norm(x, 4),
    "batch norm as an image": lambda x: F.instance_norm(x.view(3, 2, 4)).flatten(1),
}

LEAVES = {  # what stays free, where that is not all eight units one by one
    "split and join": {"a": 2, "a#2": 2, "a#3": 2},
    "chunk": {"a": 4, "a#2": 4},
    "split": {"a": 3, "a#2": 5},
    "slice and join": {"a": 4, "a#2": 4},
    "group norm": {"a": 4},  # whole groups of two
    "batch norm as an image": {"a": 2},  # the four pixels of each channel share its statistics
}

FREEZES = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "sum": lambda x: x - x.sum(),
    "var without dimension": lambda x: x / x.var(),
    "var biased": lambda x: x / torch.var(x, unbiased=False),
    "std biased": lambda x: x / torch.std(x, False),
    "sum twice": lambda x: x - x.sum().sum(-1),
    "amax": lambda x: x - x.amax(-1, keepdim=True),
    "max of all": lambda x: x / x.max(),
    "argmax": lambda x: x + x.argmax(1, keepdim=True),
    "sort": lambda x: x.sort(1).values,
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "slice": lambda x: x[:, 1:7].repeat(1, 2)[:, :8],
    "cumsum": lambda x: x.cumsum(1),
    "normalize": lambda x: F.normalize(x, dim=1),
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "one group of all": lambda x: F.group_norm(x, 1),
    "halves added": lambda x: torch.cat([sum(x.chunk(2, 1)) / x.sum(1, keepdim=True)] * 2, 1),
    "matmul": lambda x: x @ torch.ones(8, 8),
    "einsum": lambda x: torch.einsum("bi,bj->bj", x, x),
    "view as integers": lambda x: x.view(torch.int16).view(torch.float32),
    "cat with nothing": lambda x: torch.cat([torch.empty(0), x], 1),
    "literal": lambda x: x + torch.arange(8),
    "other split": lambda x: x.reshape(-1, 3).reshape(x.shape),
    "mixed with the examples": lambda x: x.reshape(4, 6).reshape(3, 8),
    "pool over units": lambda x: F.avg_pool1d(x.unsqueeze(1), 3, 1, 1).squeeze(1),
    "convolved over units": lambda x: F.conv1d(x.unsqueeze(1), torch.ones(1, 1, 3), padding=1).squeeze(1),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_operations_that_keep_units_apart(name: str) -> None:
    graph = found(between_linear(PASSES[name])(), *vectors()())
    sizes = {group: size for group, size in graph.sizes.items() if group != "a.inputs"}
    assert sizes == LEAVES.get(name, {"a": 8})


@pytest.mark.parametrize("function", FREEZES.values(), ids=list(FREEZES))
def test_operations_that_mix_units_freeze_them_and_say_so(function: Any) -> None:
    graph = found(between_linear(function)(), *vectors()())
    assert "a" not in graph.sizes
    assert any(axis == "a.weight[0]" for axis, _, _ in reasons(graph))


def test_every_rule_is_for_an_operation_that_exists() -> None:
    missing = [name for name in RULES if not hasattr(torch.ops.aten, name)]
    assert missing == []


def test_a_custom_operation_of_a_known_name_matches_no_rule() -> None:
    @torch.library.custom_op("prunus_tests::relu", mutates_args=())
    def relu(x: torch.Tensor) -> torch.Tensor:
        return x.flip(1)

    relu.register_fake(torch.empty_like)
    graph = found(Net(lambda m, x: m.b(relu(m.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 4)), *vectors()())
    assert ("a.weight[0]", "prunus_tests.relu.default", "a") in reasons(graph)


def test_a_group_behind_another_operation_of_the_same_module_names_it() -> None:
    inner = Net(lambda m, x: m.c(F.layer_norm(m.b(x), (8,))), b=nn.Linear(8, 8), c=nn.Linear(8, 4))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), inner)
    assert ("2.b.weight[0]", "aten.layer_norm.default", "2") in reasons(found(model, *vectors()()))


def test_a_finer_group_stands_in_no_cost_with_what_it_nests_in() -> None:
    """A layer over flattened maps at every one of the same maps: the two counts are not independent."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        maps = m.a(x)
        each = maps.mean((2, 3))[:, :, None, None, None]
        return m.c(m.b((maps.unsqueeze(1) * each).flatten(2)).flatten(1))

    model = Net(forward, a=nn.Conv2d(3, 4, 7), b=nn.Linear(16, 3), c=nn.Linear(12, 2))
    graph = found(model, *images()())
    assert graph.sizes == {"a": 4, "b": 3}


@pytest.mark.parametrize("region", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["grad", "cast"])
def test_regions_of_the_code_are_walked_over_and_what_freezes_in_them_is_named(region: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with region():
            x = m.c(m.b(m.a(x)).softmax(-1))
        return m.e(F.relu(m.d(x.float())))

    layers = {"a": (6, 8), "b": (8, 5), "c": (5, 4), "d": (4, 7), "e": (7, 2)}
    model = Net(forward, **{name: nn.Linear(*sizes) for name, sizes in layers.items()})
    graph = found(model, *vectors()())
    assert graph.sizes == {"a": 8, "c": 4, "d": 7}  # no input is selected before a layer in a region
    assert ("b.weight[0]", "aten.softmax.int", "b") in reasons(graph)
    assert [work.weight for work in graph.works] == [f"{name}.weight" for name in layers]
    assert Cost(graph).dense()["macs"] == 48 + 40 + 20 + 28 + 14 == count_macs(model, vectors()())


def test_an_unknown_operation_in_a_region_is_named() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = swirl(m.a(x))
        return m.b(x)

    model = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 4))
    assert ("a.weight[0]", "prunus_tests.swirl.default", "a") in reasons(found(model, *vectors()()))


def test_products_of_activations_are_work_of_their_own() -> None:
    model = between_linear(lambda x: x @ x.t() @ x)()
    graph = found(model, *vectors()())
    assert "a" not in graph.sizes
    assert ("a.weight[0]", "aten.matmul.default", "a") in reasons(graph)  # a product over the units: dead must be zero
    products = [work for work in graph.works if not work.weight]
    assert [sorted(term.size for term in work.positions) for work in products] == [[3, 3, 8], [3, 3, 8]]
    assert (graph.fixed_macs, Cost(graph).dense()["macs"]) == (0, count_macs(model, vectors()()))
    wide = found(model, *vectors()(), units=("structured", "head_dims"))
    assert wide.sizes == {"a.inputs": 6, "a": 8}
    assert wide.group("a").unit == "head dim"
    assert names(wide.group("a").sites) == ["a.bias[0]", "a.weight[0]"]
    one = Keep(wide, {"a": torch.arange(8) == 2})
    assert Cost(wide).of(one)["macs"] == 6 + 2 * 3 * 3 // 3 + 4
