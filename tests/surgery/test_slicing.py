"""Slicing: what stays, what is cut, and what must not change."""

import copy
from typing import Any

import pytest
import torch
from model_zoo import CASES, Case, Net, images, lenet, residual, tied, vectors
from torch import Tensor, nn
from torch.nn import functional as F

from prunus.axes import Graph, Keep
from prunus.errors import ModelError
from prunus.graph import analyse
from prunus.surgery import Inputs, SelectedLinear, mask_sites, prove, slice_model
from prunus.surgery.verify import max_rel_diff, outputs

EXACT = [case for case in CASES if case.units != "weights"]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def keep_some(graph: Graph, seed: int = 0) -> Keep:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        units = {}
        for name, size in graph.sizes.items():
            units[name] = torch.rand(size, generator=generator) < 0.6
            units[name][int(torch.randint(size, (1,), generator=generator))] = True
        try:
            return Keep(graph, units).closed()
        except ModelError:  # all finer units that were drawn lie under removed ones
            continue
    return Keep(graph, {})


def calibrate(model: nn.Module) -> nn.Module:
    """Batch norms as after training, biases of their own."""
    for name, tensor in tensors(model).items():
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.data.uniform_(0.5, 1.5) if name.endswith("var") else tensor.data.normal_()
    return model


def assert_equal(model: nn.Module, graph: Graph, keep: Keep, example: Any, tolerance: float = 1e-9) -> float:
    """The sliced model equals the masked one; returns the effect of the removal."""
    inputs = Inputs.of(example)
    masked = outputs(model, inputs, mask_sites(graph, keep, tensors(model)))
    small = outputs(slice_model(model, graph, keep), inputs)
    whole = outputs(model, inputs)
    pairs = list(zip(whole, masked, small, strict=True))
    effect = max((a.double() - b.double()).abs().max().item() for a, b, _ in pairs)
    error = max((b.double() - c.double()).abs().max().item() for _, b, c in pairs)
    assert all(b.shape == c.shape for _, b, c in pairs)
    assert error <= tolerance * max(effect, 1e-6)
    return effect


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_the_sliced_model_equals_the_masked_one(case: Case) -> None:
    torch.manual_seed(1)
    model = calibrate(case.make()).double()
    inputs = Inputs(case.args(), case.kwargs()).to(torch.float64)
    if case.name == "dtype conversion":
        model = model.float()  # its code insists on float32 behind the conversion
        inputs = inputs.to(torch.float32)
    graph = analyse(model, inputs.args, inputs.kwargs, units=case.units)
    proven = prove(model, graph, inputs)
    if case.name in ("view literal", "channel shuffle"):
        assert (proven.sizes, proven.form) == (graph.sizes, "graph")
        proven = prove(model, graph, inputs, "eager")
        assert set(proven.sizes) < set(graph.sizes)
    else:
        assert proven == graph
    tolerance = 1e-5 if case.name == "dtype conversion" else 1e-9
    effects = [assert_equal(model, proven, keep_some(proven, seed), inputs, tolerance) for seed in range(3)]
    assert max(effects) > 0.01 or not proven.groups


@pytest.mark.parametrize("units", ["structured", "groups"])
def test_each_unit_alone_and_all_but_one(units: str) -> None:
    model = calibrate(residual()).double()
    x = images()()[0].double()
    graph = analyse(model, (x,), units=units)
    for name, size in graph.sizes.items():
        for unit in range(size):
            assert_equal(model, graph, Keep(graph, {name: torch.arange(size) == unit}), x)
            assert_equal(model, graph, Keep(graph, {name: torch.arange(size) != unit}), x)


# ---- what the small model is -----------------------------------------------------------------------------------------


def small_of(model: nn.Module, args: tuple[Any, ...], kept: dict[str, list[int]], **options: Any) -> nn.Module:
    graph = analyse(model, args, **options)
    return slice_model(model, graph, Keep.of_indices(graph, kept).closed())


def test_layers_remember_the_sizes_they_have() -> None:
    small = small_of(residual(), images()(), {"stem": [0, 3, 5], "conv1": [2]})
    conv, norm, head = small.get_submodule("conv2"), small.get_submodule("bn2"), small.get_submodule("head")
    assert (conv.in_channels, conv.out_channels) == (1, 3)
    assert norm.num_features == 3
    assert (head.in_features, head.out_features) == (3, 4)
    assert tuple(conv.weight.shape) == (3, 1, 3, 3)
    assert "Conv2d(1, 3, kernel_size=(3, 3)" in repr(small)


def test_grouped_layers_remember_their_groups() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1, groups=2), nn.Conv2d(4, 2, 1))
    small = small_of(model, images()(), {"0": [1], "0#2": [0, 2], "1": [0, 1]})
    assert [(m.in_channels, m.out_channels, m.groups) for m in small] == [(3, 2, 1), (2, 2, 1), (2, 2, 1)]
    small = small_of(model, images()(), {"0": [0, 1], "0#2": [0, 2], "1": [1]})
    assert [(m.in_channels, m.out_channels, m.groups) for m in small] == [(3, 4, 1), (4, 2, 2), (2, 2, 1)]
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.PReLU(6), nn.Conv2d(6, 2, 1))
    small = small_of(model, images()(), {"1": [0, 2]})
    assert (small[1].in_channels, small[1].out_channels, small[1].groups) == (4, 4, 2)
    assert small[2].num_parameters == 4


def test_depthwise_layers_stay_depthwise() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Conv2d(5, 5, 3, groups=5), nn.Conv2d(5, 2, 1))
    small = small_of(model, images()(), {"0": [0, 4]})
    assert (small[1].in_channels, small[1].out_channels, small[1].groups) == (2, 2, 2)


def test_buffers_are_cut_with_their_layer() -> None:
    model = calibrate(residual())
    small = small_of(model, images()(), {"conv1": [1, 3]})
    for name in ("running_mean", "running_var", "weight", "bias"):
        dense = getattr(model.get_submodule("bn1"), name)
        assert torch.equal(getattr(small.get_submodule("bn1"), name), dense[[1, 3]])
    assert small.get_submodule("bn1").num_batches_tracked == 0
    assert list(small.state_dict()) == list(model.state_dict())


def test_features_are_selected_before_a_linear_layer() -> None:
    model = calibrate(lenet())
    kept = [0, 5, 15, 33, 47]  # of maps 0 and 2; map 1 is read nowhere
    small = small_of(model, images(1, 28)(), {"fc1.inputs": kept})
    layer = small.get_submodule("fc1")
    assert isinstance(layer, SelectedLinear)
    assert layer.selected.tolist() == [0, 5, 15, 17, 31]  # among the 32 features of the two maps that stay
    assert tuple(layer.weight.shape) == (9, 5) == (layer.out_features, layer.in_features)
    assert torch.equal(layer.weight, model.get_parameter("fc1.weight")[:, kept])
    assert small.get_parameter("conv2.weight").shape[0] == 2
    assert "fc1.selected" not in small.state_dict()
    assert ", selected" in repr(layer)
    assert type(model.get_submodule("fc1")) is nn.Linear
    moved = copy.deepcopy(small).to(torch.float64)
    assert moved.get_submodule("fc1").selected.dtype == torch.int64
    x = images(1, 28)()[0]
    assert max_rel_diff([small(x).double()], [moved(x.double())]) < 1e-5


def test_nothing_is_selected_where_whole_maps_go() -> None:
    small = small_of(lenet(), images(1, 28)(), {"conv2": [1, 2]})
    assert type(small.get_submodule("fc1")) is nn.Linear
    assert small.get_submodule("fc1").in_features == 32


def test_inputs_on_the_last_dimension_of_sequences_are_selected_too() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.randn(2, 7, 6)
    small = small_of(model, (x,), {"0.inputs": [1, 4]})
    whole = model[0].weight.detach()[:, [1, 4]]
    assert torch.allclose(small(x), model[2](F.relu(x[..., [1, 4]] @ whole.t() + model[0].bias)), atol=1e-6)


def test_tied_weights_stay_tied() -> None:
    model = tied()
    small = small_of(model, vectors()(), {"first": [0, 2, 3]})
    a, b = small.get_submodule("a"), small.get_submodule("b")
    assert a.weight is b.weight
    assert tuple(a.weight.shape) == (3, 3)
    assert (b.in_features, b.out_features) == (3, 3)
    assert model.get_submodule("a").weight is model.get_submodule("b").weight
    assert len(list(small.parameters())) == len(list(model.parameters()))


def test_a_module_under_two_names_stays_one() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(6, 8), layer, nn.ReLU(), layer, nn.Linear(8, 2))
    small = small_of(model, vectors()(), {"0": [1, 6]})
    assert small[1] is small[3]
    assert tuple(small[3].weight.shape) == (2, 2)


def test_tied_buffers_stay_tied() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: Tensor) -> None:
            super().__init__()
            self.register_buffer("scale", scale)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    scale = torch.rand(8)
    model = nn.Sequential(nn.Linear(6, 8), Scaled(scale), nn.ReLU(), Scaled(scale), nn.Linear(8, 2))
    small = small_of(model, vectors()(), {"0": [1, 6]})
    assert small[1].scale is small[3].scale
    assert torch.equal(small[1].scale, scale[[1, 6]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    model = residual().to(dtype)
    x = images()()[0].to(dtype)
    graph = prove(model, analyse(model, (x,)), x)
    assert list(graph.sizes) == ["stem", "conv1"]
    small = slice_model(model, graph, keep_some(graph))
    for name, tensor in tensors(small).items():
        assert tensor.dtype == tensors(model)[name].dtype
    assert small.eval()(x).dtype == dtype


def test_modes_gradients_and_hooks_stay() -> None:
    model = residual().train()
    model.get_submodule("bn1").eval()
    model.get_parameter("conv1.weight").requires_grad_(False)
    seen: list[str] = []
    model.get_submodule("conv1").register_forward_hook(lambda *_: seen.append("hook"))
    small = small_of(model, images()(), {"conv1": [0, 2]})
    assert [m.training for m in small.modules()] == [m.training for m in model.modules()]
    assert small.training
    for name, parameter in small.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad == model.get_parameter(name).requires_grad
        assert parameter.is_leaf
        assert parameter.grad is None
    before = len(seen)
    small(*images()()).sum().backward()
    assert len(seen) == before + 1
    assert small.get_parameter("head.weight").grad is not None


def test_the_dense_model_is_not_touched() -> None:
    model = calibrate(lenet())
    before = {name: (id(tensor), tensor.clone()) for name, tensor in tensors(model).items()}
    layout = repr(model)
    small = small_of(model, images(1, 28)(), {"conv1": [0], "conv2": [1, 2], "fc1": [3], "fc1.inputs": [16, 40]})
    with torch.no_grad():
        for tensor in tensors(small).values():
            tensor.zero_()
    assert repr(model) == layout
    for name, tensor in tensors(model).items():
        assert (id(tensor), True) == (before[name][0], torch.equal(tensor, before[name][1]))
    assert type(small) is type(model)


def test_weights_given_are_taken_instead_of_the_models() -> None:
    model = lenet()
    graph = analyse(model, images(1, 28)())
    weight = torch.arange(36.0).view(4, 9)
    small = slice_model(model, graph, Keep.of_indices(graph, {"fc1": [0, 8]}).closed(), {"fc2.weight": weight})
    assert torch.equal(small.get_parameter("fc2.weight"), weight[:, [0, 8]])
    assert torch.equal(small.get_parameter("fc1.bias"), model.get_parameter("fc1.bias")[[0, 8]])


def test_an_open_keep_gives_an_equal_copy() -> None:
    model = calibrate(lenet())
    graph = analyse(model, images(1, 28)())
    small = slice_model(model, graph, Keep(graph, {}))
    x = images(1, 28)()[0]
    assert torch.equal(small(x), model(x))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(small.parameters(), model.parameters(), strict=True))


def test_single_weights_are_masked_in_their_place() -> None:
    model = lenet()
    graph = analyse(model, images(1, 28)(), units="weights")
    mask = torch.rand(1008) < 0.5
    keep = Keep(graph, {"fc1.weight": mask})
    masked = mask_sites(graph, keep, tensors(model))
    assert torch.equal(masked["fc1.weight"], model.get_parameter("fc1.weight") * mask.view(9, 112))
    assert torch.equal(masked["fc2.weight"], model.get_parameter("fc2.weight"))
    assert slice_model(model, graph, keep, masked).get_parameter("fc1.weight").shape == (9, 112)


def test_slicing_in_training_mode_changes_no_statistics() -> None:
    """A spectral norm iterates whenever its weight is asked for in training."""
    spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 6, 3))
    model = nn.Sequential(spectral, nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 1)).train()
    graph = analyse(model, images()())
    assert list(graph.sizes) == ["1"]
    assert prove(model, graph, images()()) == graph
    small = slice_model(model, graph, Keep.of_indices(graph, {"1": [0, 3]}))
    for name, buffer in model.named_buffers():
        assert torch.equal(small.get_buffer(name), buffer)
    assert small[0].training


def test_a_model_that_cannot_be_copied_is_refused_plainly() -> None:
    model = lenet()
    model.cache = (n for n in range(3))  # type: ignore[assignment]
    graph = analyse(model, images(1, 28)())
    with pytest.raises(ModelError, match="The model Net cannot be copied"):
        slice_model(model, graph, Keep(graph, {}))
    with pytest.raises(ModelError, match="The model Net cannot be copied"):
        prove(model, graph, images(1, 28)())


def test_a_selection_needs_a_plain_linear_layer() -> None:
    class Own(nn.Linear):
        pass

    model = lenet()
    graph = analyse(model, images(1, 28)())
    model.fc1 = Own(112, 9)  # type: ignore[assignment]
    keep = Keep.of_indices(graph, {"fc1.inputs": [1, 20]}).closed()
    with pytest.raises(ModelError, match=r"The inputs of fc1 can be selected only where it is a plain nn\.Linear"):
        slice_model(model, graph, keep)


def test_a_linear_layer_of_the_users_own_class_is_not_gated_finer() -> None:
    class Own(nn.Linear):
        pass

    model = Net(lambda m, x: m.b(F.relu(m.a(x))), a=Own(6, 8), b=nn.Linear(8, 2))
    assert list(analyse(model, vectors()()).sizes) == ["a"]
