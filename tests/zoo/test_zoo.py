"""The zoo: what each model's architecture says can shrink is found, counted, and removed exactly in both forms."""

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from zoo_models import ENTRIES, ZOO
from zoo_prepared import (
    EAGER,
    EVERYTHING,
    GRAPH,
    HEAVY,
    analysed,
    both_forms,
    dense,
    gated_at,
    half,
    inputs_of,
    own_form,
    proven,
    shrunk,
    slow_if_heavy,
)

import prunus
from prunus.axes import Graph
from prunus.errors import ModelError
from prunus.graph import analyse
from prunus.measure import count_bytes, count_macs, count_params, with_batch
from prunus.surgery import Inputs
from prunus.surgery.slicing import kept_indices
from prunus.surgery.verify import TOLERANCE, max_rel_diff, outputs

Units = dict[str, tuple[int, int]]

# What "structured" must find: for every kind of unit, how many groups and how many units in all of them.
STRUCTURED: dict[str, Units] = {
    "mlp": {"input": (1, 48), "neuron": (2, 32 + 24)},
    "lenet5": {"map": (2, 8 + 12), "input": (1, 12 * 16), "neuron": (1, 24)},
    "vgg_bn": {"map": (7, 8 + 8 + 12 + 12 + 16 + 16 + 24), "input": (1, 24 * 4), "neuron": (2, 24 + 24)},
    # Four residual streams, the first of them the stem's, and the inner maps of two blocks a stage.
    "resnet18": {"map": (4 + 8, (8 + 16 + 32 + 64) + 2 * (8 + 16 + 32 + 64))},
    # The stem, four residual streams, and two waists in each of 3 + 4 + 6 + 3 bottlenecks.
    "resnet50": {"map": (1 + 4 + 32, 4 + (16 + 32 + 64 + 128) + 2 * (3 * 4 + 4 * 8 + 6 * 16 + 3 * 32))},
    "resnet56": {"map": (3 + 27, (8 + 16 + 32) + 9 * (8 + 16 + 32))},
    # Streams of 8, of 4 + 8 + 4 and of 8 + 16 + 8: padding makes new maps on both sides of those that pass.
    "resnet_padded": {"map": (5 + 6, 8 + 2 * 4 + 2 * 8 + 2 * (8 + 16 + 32))},
    "wide_resnet": {"map": (1 + 3 + 6, 4 + (12 + 24 + 48) + 2 * (12 + 24 + 48))},
    "preact_resnet": {"map": (3 + 9, (8 + 16 + 32) + 3 * (8 + 16 + 32))},
    # Two streams; in each of three blocks 4 convolution groups, what each reads, what each makes, and 6 squeezed maps.
    "regnet": {"map": (2 + 12, 16 + 32 + (4 + 4 + 4 + 6) + (4 + 8 + 8 + 6) + (4 + 8 + 8 + 6))},
    # Depthwise convolutions go with the maps they read: streams and expanded maps are left.
    "mobilenet_v2": {"map": (8, (8 + 12 + 16) + (32 + 48 + 48 + 64) + 32)},
    "mobilenet_v3": {
        "map": (11, (8 + 12 + 16) + (24 + 32 + 32 + 40) + (4 + 8 + 12) + 32),  # streams, expanded, squeezed, last
        "neuron": (1, 24),
    },
    "efficientnet": {"map": (11, (8 + 12 + 16) + (32 + 48 + 48) + (2 + 2 + 3 + 3) + 32)},
    # Shuffling pairs the maps of both branches, and every chunk halves what passes by: 8 = 4 + (2 + 2), 12 = 6 + 6.
    "shufflenet": {"map": (12, 8 + 8 + (4 + 2 + 2) + 8 + 8 + 12 + (6 + 6) + 12 + 32)},
    # Few: each of four convolution groups reads maps that another four made, shuffled, and with a stride the seam of
    # a concatenation runs through them. What lines up in all of these is one pair of maps a stage.
    "shufflenet_v1": {"map": (2, 2 + 2)},
    # The stem, a waist of 12 and 6 new maps in each of eight layers, two transitions.
    "densenet": {"map": (1 + 16 + 2, 12 + 8 * (12 + 6) + 15 + 16)},
    "inception": {"map": (1 + 7 + 7, 8 + (6 + 5 + 8 + 4 + 6 + 7 + 4) + (6 + 5 + 8 + 4 + 6 + 7 + 5))},
    "convnext": {"neuron": (4, 32 + 48 + 48 + 64)},  # all streams go through layer norms
    "unet": {"map": (12, 2 * 8 + 2 * 12 + 2 * 16 + 3 * 12 + 3 * 8)},
    "unet_groupnorm": {"map": (12, 10 * 4 + 12 + 8)},  # a unit is a group of the norm: four in each of ten
    "unet_bilinear": {"map": (12, 2 * 8 + 2 * 12 + 2 * 16 + 3 * 12 + 3 * 8)},
    "superres": {"map": (3, 16 + 16 + 12)},  # a unit before the pixel shuffle is four maps
    "gan_generator": {"input": (1, 12), "neuron": (1, 32), "map": (2, 16 + 8)},  # a neuron is 16 pixels of a map
    "seg_fpn": {"map": (5, 8 + 12 + 16 + 12 + 12)},  # the lateral maps are added up, and so are the levels
    "vit": {"head": (2, 2 * 4), "neuron": (2, 2 * 48)},
    "vit_explicit": {"head": (2, 2 * 4), "neuron": (2, 2 * 48)},
    "swin": {"head": (3, 3 + 3 + 4), "neuron": (3, 24 + 24 + 48)},
    "einsum_attention": {"head": (2, 2 * 3), "neuron": (2, 2 * 48)},
    "torch_encoder": {"head": (2, 2 * 4), "neuron": (2, 2 * 40)},
    "torch_mha": {"input": (1, 6), "head": (1, 4), "neuron": (1, 32)},
    "torch_decoder": {"input": (1, 6), "head": (4, 2 * (4 + 4)), "neuron": (2, 2 * 32)},  # two attentions a layer
    "hf_bert": {"head": (2, 2 * 4), "neuron": (3, 2 * 40 + 32)},  # with the pooler
    "hf_bert_eager": {"head": (2, 2 * 4), "neuron": (2, 2 * 40)},
    "hf_distilbert": {"head": (2, 2 * 3), "neuron": (3, 2 * 40 + 24)},  # with the classifier's first layer
    "hf_gpt2": {"head": (2, 2 * 4), "neuron": (2, 2 * 128)},
    # In each layer two key-value heads, and two query heads for each of them.
    "hf_llama": {"head": (4, 2 * (2 + 2)), "neuron": (2, 2 * 48)},
    "hf_mistral": {"head": (4, 2 * (2 + 2)), "neuron": (2, 2 * 40)},
    # A stack's layers share the bias of its first one's heads: encoder, decoder, and the bias of zeros between them.
    "hf_t5": {"head": (3, 3 * 4), "neuron": (4, 4 * 40)},
    "hf_vit": {"head": (2, 2 * 4), "neuron": (2, 2 * 48)},
    # Two layers of the encoder, two with two attentions each of the decoder; the second convolution makes the stream.
    "hf_whisper": {"map": (1, 24), "head": (6, 6 * 4), "neuron": (4, 4 * 32)},
    "conv_lstm": {"map": (2, 8 + 8), "input": (1, 12)},  # hidden units stay: they are read again at every step
    "conv_gru": {"map": (2, 8 + 8), "input": (1, 2 * 12)},
    "shared_module": {"map": (2, 12 + 10)},
    "tied_autoencoder": {"neuron": (2, 16 + 8)},
    "tied_lm": {"feature": (1, 24), "map": (1, 32)},
    "custom_op": {"map": (2, 8 + 12)},  # what the unknown operation reads and makes stays
    "glu_mlp": {"input": (1, 12), "neuron": (4, 24 + 20 + 16 + 14)},  # a unit is a value and its gate
    "rms_net": {"neuron": (3, 3 * 32)},
}

# What is found besides when head dimensions and residual streams are asked for.
MORE: dict[str, Units] = {
    "vit": {"head dim": (2, 2 * 6)},  # one layer makes queries, keys and values as (3 x heads x dimensions)
    "vit_explicit": {"head dim": (4, 4 * 6)},  # of queries and keys, and of values
    "swin": {"head dim": (3, 4 + 4 + 6)},
    "einsum_attention": {"head dim": (4, 4 * 6)},
    "torch_encoder": {"head dim": (2, 2 * 6)},
    "torch_mha": {"head dim": (1, 6)},
    "torch_decoder": {"head dim": (4, 4 * 6)},
    "hf_bert": {"head dim": (4, 4 * 8)},
    "hf_bert_eager": {"head dim": (4, 4 * 8)},
    "hf_distilbert": {"head dim": (4, 4 * 8)},
    "hf_gpt2": {"head dim": (4, 4 * 8)},
    # Values of each layer; queries and keys go in pairs that are rotated together, by one table for all layers.
    "hf_llama": {"head dim": (2 + 1, 2 * 8 + 4), "width": (1, 32)},
    "hf_mistral": {"head dim": (2 + 1, 2 * 6 + 3), "width": (1, 32)},
    "hf_t5": {"head dim": (12, 12 * 6)},  # no width: the encoder's stream is an output of the network
    "hf_vit": {"head dim": (4, 4 * 8)},
    "hf_whisper": {"head dim": (12, 12 * 6)},
    "rms_net": {"width": (1, 24)},
}

# Branches that "branches" must find: residual ones, each a block's, or an attention's and an MLP's of a block.
BRANCHES = {
    "resnet18": 8, "resnet50": 16, "resnet56": 27, "resnet_padded": 6, "wide_resnet": 6, "preact_resnet": 9,
    "regnet": 3,
    "mobilenet_v2": 3, "mobilenet_v3": 3, "efficientnet": 2,  # those of stride 1 that keep the number of maps
    "shufflenet_v1": 2,  # with a stride the input is concatenated
    "convnext": 4,
    "superres": 1,  # the other addition is to the network's input
    "seg_fpn": 2,  # the lateral maps, or what comes from above
    "vit": 4, "vit_explicit": 4, "swin": 6, "einsum_attention": 4, "torch_encoder": 4, "torch_mha": 1,
    "torch_decoder": 6, "hf_bert": 4, "hf_bert_eager": 4, "hf_distilbert": 4, "hf_gpt2": 4, "hf_llama": 4,
    "hf_mistral": 4, "hf_t5": 4 + 6, "hf_vit": 4,
    "hf_whisper": 4 + 5,  # the decoder's first attention makes the mask that the second reads too
    "glu_mlp": 2, "rms_net": 3,
}  # fmt: skip

# Whose own code runs with fewer head dimensions too: PyTorch's attention, which then remembers its scale.
EAGER_IN_ALL = {"torch_encoder", "torch_mha", "torch_decoder"}

# What PyTorch's counter does not see into on a CPU: attention or an LSTM as one operation.
FUSED = {
    "vit", "torch_encoder", "torch_mha", "torch_decoder", "hf_bert", "hf_distilbert", "hf_gpt2", "hf_llama",
    "hf_mistral", "hf_t5", "hf_vit", "hf_whisper", "conv_lstm",
}  # fmt: skip

# Different enough from each other to be shrunk as operations too whenever tests are run; the others among the slow.
AS_OPERATIONS = (
    "mlp", "vgg_bn", "regnet", "mobilenet_v2", "densenet", "unet_groupnorm", "superres", "torch_mha", "hf_bert",
    "hf_llama", "conv_lstm", "tied_lm", "glu_mlp", "rms_net",
)  # fmt: skip

WITH_BRANCHES = ("structured", "branches")
DENSITIES = (0.9, 0.7, 0.5, 0.25, 0.0)  # 0.0: one unit left of every group
names = pytest.mark.parametrize("name", list(STRUCTURED))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    analyse(nn.Linear(3, 2), (torch.zeros(2, 3),))  # the first export loads what the others find loaded
    yield
    torch.set_num_threads(threads)


def counted(small: nn.Module, inputs: Inputs) -> dict[str, int]:
    macs = count_macs(small, inputs.args, inputs.kwargs)
    return {"params": count_params(small), "macs": macs, "bytes": count_bytes(small)}


def units_of(graph: Graph) -> Units:
    groups, units = Counter(), Counter()  # type: ignore[var-annotated]
    for group in graph.groups:
        groups[group.unit] += 1
        units[group.unit] += group.size
    return {unit: (groups[unit], units[unit]) for unit in groups}


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_there_are_as_many_models_as_were_written() -> None:
    assert len(ENTRIES) == len(ZOO) == 49
    assert set(STRUCTURED) == set(ZOO) - {"control_flow"}
    assert set(MORE) <= set(STRUCTURED)
    assert set(EAGER) | GRAPH == set(STRUCTURED)
    assert len(EAGER) == 39
    assert set(MORE) > EAGER_IN_ALL


@names
def test_the_units_that_the_architecture_has_are_found_and_quickly(name: str) -> None:
    graph, seconds = analysed(name)
    assert units_of(graph) == STRUCTURED[name]
    assert seconds < 3


@slow_if_heavy(MORE)
def test_head_dimensions_and_residual_streams_are_found(name: str) -> None:
    graph, _ = analysed(name, EVERYTHING)
    assert units_of(graph) == STRUCTURED[name] | MORE[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STRUCTURED if name not in MORE])
def test_head_dimensions_and_residual_streams_are_not_found_where_there_are_none(name: str) -> None:
    graph, _ = analysed(name, EVERYTHING)
    assert units_of(graph) == STRUCTURED[name]


@slow_if_heavy(STRUCTURED)
def test_everything_that_is_found_can_be_removed_and_the_models_own_code_is_preferred(name: str) -> None:
    graph = proven(name)
    assert graph.sizes == analysed(name)[0].sizes
    assert graph.form == own_form(name)


def test_a_branch_on_the_data_is_refused_in_one_sentence() -> None:
    model, x = ZOO["control_flow"].make(), ZOO["control_flow"].inputs()
    with pytest.raises(ModelError) as caught:
        prunus.gate(model, x)
    said = str(caught.value)
    assert said.startswith(
        "The model ControlFlow cannot be exported on these example inputs (it branches on the values"
    )
    assert "\n" not in said
    assert "Traceback" not in said


def test_what_an_unknown_operation_freezes_bears_its_name() -> None:
    graph, _ = analysed("custom_op")
    assert {f.axis: (f.operation, f.module) for f in graph.frozen} == {
        "conv1.weight[1]": ("network input", "conv1"),
        "conv2.weight[0]": ("zoo_tests.mirror.default", "conv2"),
        "conv3.weight[1]": ("zoo_tests.mirror.default", "conv3"),
        "fc.weight[0]": ("network output", "fc"),
    }


# ---- removed, counted, equal -----------------------------------------------------------------------------------------


def assert_equal_and_counted(name: str, form: str, densities: Any = DENSITIES, units: Any = "structured") -> None:
    inputs, effects = inputs_of(name), []
    whole = outputs(dense(name), inputs)
    for density in densities:
        gated = gated_at(name, density, units)
        small = shrunk(name, gated, form)
        for one in (inputs, inputs.random(3)):
            reference = outputs(gated, one)
            assert max_rel_diff(reference, outputs(small, one)) <= TOLERANCE, density
        assert gated.cost.of(gated.keep()) == counted(small, inputs), density
        effects.append(max_rel_diff(whole, outputs(gated, inputs)))
    assert min(effects) > 1e-4  # what is removed is missed


@slow_if_heavy(STRUCTURED)
def test_what_is_shrunk_equals_what_is_gated_and_costs_what_was_said(name: str) -> None:
    assert_equal_and_counted(name, own_form(name))


@pytest.mark.parametrize("name", sorted(HEAVY))
def test_so_it_does_where_that_takes_longer(name: str) -> None:
    assert_equal_and_counted(name, own_form(name), (0.5, 0.0))


@pytest.mark.parametrize("name", AS_OPERATIONS)
def test_so_does_its_graph_form(name: str) -> None:
    assert_equal_and_counted(name, "graph", (0.5, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
def test_so_does_every_graph_form_at_every_density(name: str) -> None:
    assert_equal_and_counted(name, "graph")


@pytest.mark.parametrize("name", [name for name in MORE if name in GRAPH or name in AS_OPERATIONS])
def test_head_dimensions_and_residual_streams_are_removed_exactly_too(name: str) -> None:
    assert_equal_and_counted(name, "graph", (0.5, 0.0), EVERYTHING)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MORE))
def test_head_dimensions_and_residual_streams_are_proved_and_removed_at_every_density(name: str) -> None:
    graph = proven(name, EVERYTHING)
    assert units_of(graph) == STRUCTURED[name] | MORE[name]
    assert graph.form == ("eager" if name in EAGER_IN_ALL else "graph")
    for form in {graph.form, "graph"}:
        assert_equal_and_counted(name, form, units=EVERYTHING)


@pytest.mark.parametrize("name", [name for name in BRANCHES if name in GRAPH or name in AS_OPERATIONS])
def test_branches_are_left_out_exactly(name: str) -> None:
    graph, _ = analysed(name, WITH_BRANCHES)
    assert units_of(graph) == STRUCTURED[name] | {"branch": (BRANCHES[name], BRANCHES[name])}
    assert_equal_and_counted(name, "graph", (0.5, 0.0), WITH_BRANCHES)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(STRUCTURED))
def test_branches_are_left_out_exactly_at_every_density(name: str) -> None:
    graph, _ = analysed(name, WITH_BRANCHES)
    assert units_of(graph).pop("branch", (0, 0))[0] == BRANCHES.get(name, 0)
    if name in BRANCHES:
        assert proven(name, WITH_BRANCHES).sizes == graph.sizes
        assert_equal_and_counted(name, "graph", (0.9, 0.5, 0.0), WITH_BRANCHES)


# ---- what a shrunk model is good for ---------------------------------------------------------------------------------


def loss_of(result: Any) -> Tensor:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.square().mean() for leaf in leaves if leaf.requires_grad]).sum()


@both_forms(STRUCTURED)
def test_gradients_are_those_of_the_gated_model_where_units_stay(name: str, form: str) -> None:
    """At every kept place of every parameter, and none for a parameter that had none."""
    inputs, gated, small = inputs_of(name), gated_at(name, 0.5), copy.deepcopy(half(name, form))
    folded = gated.fold()
    weights = {
        n: folded.get(n, p).detach().clone().requires_grad_(p.requires_grad) for n, p in dense(name).named_parameters()
    }
    loss_of(functional_call(dense(name), weights, inputs.args, dict(inputs.kwargs))).backward()
    loss_of(small(*inputs.args, **inputs.kwargs)).backward()
    stays = kept_indices(gated.graph, gated.keep())
    parameters = dict(small.named_parameters())
    assert list(parameters) == list(weights)
    scale = max(float(w.grad.abs().max()) for w in weights.values() if w.grad is not None)
    for parameter, weight in weights.items():
        wanted, found = weight.grad, parameters[parameter].grad
        assert (found is None) == (wanted is None), parameter
        if wanted is None or found is None:
            continue
        for dim, index in enumerate(stays.get(parameter, [])):
            wanted = wanted if index is None else wanted.index_select(dim, index)
        assert float((wanted - found).abs().max()) <= 1e-4 * max(float(wanted.abs().max()), 1e-3 * scale), parameter


@both_forms(STRUCTURED)
def test_a_training_step_runs_and_reaches_what_it_reached_before(name: str, form: str) -> None:
    inputs, reached = inputs_of(name), []
    for model in (ZOO[name].make(), copy.deepcopy(half(name, form))):
        loss_of(model.train()(*inputs.args, **inputs.kwargs)).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert all(bool(g.isfinite().all()) for g in grads.values())
        reached.append(list(grads))
    assert reached[0] == reached[1]


@both_forms(STRUCTURED)
def test_what_is_saved_comes_back_bit_for_bit(name: str, form: str, tmp_path: Path) -> None:
    small, fresh = half(name, form), ZOO[name].make().eval()
    saved = set(fresh.state_dict())
    with torch.no_grad():
        for tensor_name, tensor in [*fresh.named_parameters(), *fresh.named_buffers()]:
            if tensor_name in saved and tensor.is_floating_point():
                tensor.mul_(0.5).add_(0.25)  # whatever was in it is not what comes back
    prunus.save(small, tmp_path / "small.safetensors")
    loaded = prunus.load(fresh, tmp_path / "small.safetensors")
    one, two = small.state_dict(), loaded.state_dict()
    assert list(one) == list(two)
    assert all(torch.equal(one[key], two[key]) for key in one)
    inputs = inputs_of(name)
    wanted, found = outputs(small, inputs), outputs(loaded, inputs)
    assert len(wanted) == len(found) > 0
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@both_forms(STRUCTURED)
def test_other_batches_run(name: str, form: str) -> None:
    inputs, gated = inputs_of(name), gated_at(name, 0.5)
    small = half(name, form)
    for batch in (1, 3, 5):
        one = Inputs(*with_batch(inputs.args, batch, inputs.kwargs))
        assert max_rel_diff(outputs(gated, one), outputs(small, one)) <= TOLERANCE, batch


@both_forms(STRUCTURED)
def test_pytorchs_own_counter_sees_the_same_macs(name: str, form: str) -> None:
    inputs, small = inputs_of(name), half(name, form)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        small(*inputs.args, **inputs.kwargs)
    seen, batch = counter.get_total_flops() / 2, 2
    counted = count_macs(small, inputs.args, inputs.kwargs)
    if name in FUSED:
        assert seen < batch * counted
    else:
        assert seen == batch * counted
