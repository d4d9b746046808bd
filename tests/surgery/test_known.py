"""Layers whose sizes are known run smaller in their own code: of PyTorch, and of transformers."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from removal import assert_comes_back, drawn, kinds, proven, removed
from torch import Tensor, nn
from zoo_models import ZOO
from zoo_random import VOCAB, normal, seeded, words

import prunus
from prunus.surgery import slice_model

ZOO_UNITS = {
    "unet_groupnorm": {"map": 12},
    "hf_bert": {"head": 2, "neuron": 3},
    "hf_bert_eager": {"head": 2, "neuron": 2},
    "hf_distilbert": {"head": 2, "neuron": 3},
    "hf_vit": {"head": 2, "neuron": 2},
    "hf_gpt2": {"head": 2, "neuron": 2},
    "hf_llama": {"head": 4, "neuron": 2},
    "hf_mistral": {"head": 4, "neuron": 2},
    "hf_t5": {"head": 3, "neuron": 4},
    "hf_whisper": {"map": 1, "head": 6, "neuron": 4},
    "torch_encoder": {"head": 2, "neuron": 2},
    "torch_mha": {"input": 1, "head": 1, "neuron": 1},
    "torch_decoder": {"input": 1, "head": 4, "neuron": 2},
    "conv_lstm": {"map": 2, "input": 1},
    "conv_gru": {"map": 2, "input": 1},
}


@pytest.mark.parametrize("name", ZOO_UNITS)
def test_all_of_a_model_shrinks_in_its_own_code(name: str, tmp_path: Path) -> None:
    entry = ZOO[name]
    model, example = entry.make().eval(), entry.inputs()
    graph = proven(model, example)
    assert kinds(graph) == ZOO_UNITS[name]
    for seed in range(3):
        small = removed(model, graph, example, seed)
        assert type(small) is type(model)
        assert_comes_back(small, entry.make().eval(), example, tmp_path / f"{seed}.prunus")


class Maps(nn.Module):
    """Maps with something between two convolutions."""

    def __init__(self, *between: nn.Module, maps: int = 12, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, maps, 3, groups=1)
        self.between = nn.Sequential(*between)
        self.second = nn.Conv2d(maps, 5, 3, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Sentences(nn.Module):
    """Words whose features are read by something."""

    def __init__(self, reader: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 8, padding_idx=0)
        self.norm = norm if norm is not None else nn.Identity()
        self.reader = reader

    def forward(self, tokens: Tensor) -> Tensor:
        read = self.reader(self.norm(self.table(tokens)))
        return read[0] if isinstance(read, tuple) else read


@seeded()
def maps(*between: Callable[[], nn.Module]) -> nn.Module:
    return Maps(*(one() for one in between))


@seeded()
def sentences(reader: Callable[[], nn.Module], norm: Callable[[], nn.Module] = nn.Identity) -> nn.Module:
    return Sentences(reader(), norm())


PICTURE = (normal(2, 3, 9, 9),)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(affine: bool, tmp_path: Path) -> None:
    model = maps(lambda: nn.GroupNorm(4, 12, affine=affine), nn.ReLU)
    graph = proven(model, PICTURE)
    (group,) = graph.groups
    assert (group.size, group.unit) == (4, "map")
    small = removed(model, graph, PICTURE)
    norm, left = small.between[0], int(drawn(graph, 0).units[group.name].sum())
    assert (norm.num_groups, norm.num_channels) == (left, 3 * left)
    assert_comes_back(small, copy.deepcopy(model), PICTURE, tmp_path / "m.prunus")


def test_group_norm_as_a_function_is_no_module_with_groups(tmp_path: Path) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.group_norm(x, x.shape[1] // 3)

    model = maps(Own, nn.ReLU)
    graph = proven(model, PICTURE)
    assert graph.sizes == {"first": 4}
    assert_comes_back(removed(model, graph, PICTURE), copy.deepcopy(model), PICTURE, tmp_path / "m.prunus")


@pytest.mark.parametrize("layer", [nn.BatchNorm2d, lambda n: nn.InstanceNorm2d(n, affine=True), nn.PReLU])
def test_a_number_a_map(layer: Callable[[int], nn.Module]) -> None:
    model = maps(lambda: layer(12))
    small = removed(model, proven(model, PICTURE), PICTURE)
    held = small.between[0]
    assert getattr(held, "num_features", getattr(held, "num_parameters", None)) == small.first.out_channels < 12


def test_channel_shuffle(tmp_path: Path) -> None:
    @seeded()
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 12, 1),
            nn.ReLU(),
            nn.ChannelShuffle(3),
            nn.ReLU(),
            nn.Conv2d(12, 8, 3, groups=4),
            nn.Conv2d(8, 4, 1),
        )

    model = make()
    graph = proven(model, PICTURE)
    assert any(3 in (group.size,) for group in graph.groups)
    small = removed(model, graph, PICTURE, seed=1)
    assert small[2].groups < 3
    assert small[4].groups == small[4].in_channels // (small[4].weight.shape[1])
    assert_comes_back(small, make(), PICTURE, tmp_path / "m.prunus")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrences_read_less(kind: type[nn.RNNBase], tmp_path: Path) -> None:
    def make() -> nn.Module:
        return sentences(lambda: kind(8, 6, num_layers=2, bidirectional=True, batch_first=True))

    model, example = make(), (words(),)
    graph = proven(model, example)
    assert kinds(graph) == {"feature": 1}
    small = removed(model, graph, example)
    rnn = small.reader
    assert rnn.input_size == small.table.embedding_dim == rnn.weight_ih_l0.shape[1] < 8
    assert rnn._flat_weights[0] is rnn.weight_ih_l0  # what it computes with is what is trained and saved
    back = assert_comes_back(small, make(), example, tmp_path / "m.prunus")
    back(*example).sum().backward()
    assert back.reader.weight_ih_l0.grad is not None


def test_a_recurrence_of_which_nothing_goes_computes_with_its_own_weights() -> None:
    model = sentences(lambda: nn.GRU(8, 6, batch_first=True))
    graph = proven(model, (words(),))
    small = slice_model(model, graph, prunus.Keep(graph, {}))
    with torch.no_grad():
        small.reader.weight_ih_l0.zero_()
    assert not torch.allclose(small(words()), model(words()))


@pytest.mark.parametrize("eps", [0.1, None])
def test_rms_norm_over_a_width(eps: float | None, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return sentences(lambda: nn.Linear(8, 5), lambda: nn.RMSNorm(8, eps=eps))

    model, example = make(), (words(),)
    graph = proven(model, example, units="width")
    assert kinds(graph) == {"width": 1}
    small = removed(model, graph, example)
    left = small.table.embedding_dim
    assert small.norm.normalized_shape == (left,)
    assert small.norm.eps == pytest.approx((torch.finfo(torch.float32).eps if eps is None else eps) * 8 / left)
    assert torch.equal(small.norm.weight, model.norm.weight[drawn(graph, 0).units["table"]] * (8 / left) ** 0.5)
    assert_comes_back(small, make(), example, tmp_path / "m.prunus")


def test_norms_that_share_a_weight_rescale_it_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCAB, 8)
            self.one, self.two = nn.RMSNorm(8), nn.RMSNorm(8)
            self.two.weight = self.one.weight
            self.a, self.b = nn.Linear(8, 5), nn.Linear(8, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.table(tokens)
            return self.a(self.one(x)) * self.b(self.two(x))

    model = seeded()(Twice)()
    small = removed(model, proven(model, (words(),), units="width"), (words(),))
    assert small.one.weight is small.two.weight


def test_the_graph_form_holds_weights_as_they_are() -> None:
    model = sentences(lambda: nn.Linear(8, 5), lambda: nn.RMSNorm(8))
    graph = proven(model, (words(),), units="width")
    keep = drawn(graph, 0)
    held = slice_model(model, graph, keep, form="graph")
    assert torch.equal(held.norm.weight, model.norm.weight[keep.units["table"]])


@pytest.mark.parametrize("name", ["torch_encoder", "hf_gpt2", "hf_llama", "conv_gru", "unet_groupnorm"])
def test_through_both_doors(name: str) -> None:
    entry = ZOO[name]
    model, example = entry.make().eval(), entry.inputs()
    gated = prunus.gate(model, example, form="eager")
    with torch.no_grad():
        gated.log_alpha.normal_(std=4.0, generator=torch.Generator().manual_seed(0))
    small, receipt = prunus.shrink(gated, example, seconds=0.0, batches=1)
    assert type(small) is type(model)
    assert receipt["exactness"]["ok"]
    assert receipt["deployed"]["macs"] < receipt["dense"]["macs"]


def test_no_other_library_is_imported() -> None:
    source = Path(prunus.__file__).parent
    assert not [path for path in source.rglob("*.py") if "import transformers" in path.read_text()]
