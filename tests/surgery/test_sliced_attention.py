"""PyTorch's attention with heads gone: the same call, the same answers, in training and in inference."""

import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from removal import assert_comes_back, drawn, proven, removed, tensors
from torch import Tensor, nn
from zoo_models import ZOO
from zoo_random import normal, seeded

import prunus
from prunus.front import analyse_and_prove
from prunus.graph import analyse
from prunus.surgery import Inputs, mask_sites, outputs, slice_model
from prunus.surgery.known import SlicedAttention
from prunus.surgery.verify import max_rel_diff

DIM, HEADS = 24, 4


@seeded()
def dense(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(DIM, HEADS, **options)


def sliced(module: nn.MultiheadAttention) -> SlicedAttention:
    """The same with nothing removed."""
    same: Any = copy.deepcopy(module)
    same.__class__ = SlicedAttention
    same.scale, same.value_dim, same._qkv_same_embed_dim = same.head_dim**-0.5, same.head_dim, False
    return same


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def padded(last: int = 2) -> Tensor:
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[1, -last:] = True
    return mask


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights of every head": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
    "mask": {"attn_mask": causal(7)},
    "float mask": {"attn_mask": normal(7, 7)},
    "a mask a head": {"attn_mask": normal(3 * HEADS, 7, 7)},
    "a mask a head, no weights": {"attn_mask": normal(3 * HEADS, 7, 7), "need_weights": False},
    "causal": {"attn_mask": causal(7), "is_causal": True},
    "causal, no weights": {"attn_mask": causal(7), "is_causal": True, "need_weights": False},
    "padding": {"key_padding_mask": padded()},
    "padding, no weights": {"key_padding_mask": padded(), "need_weights": False},
    "float padding": {"key_padding_mask": normal(3, 7)},
    "both": {"key_padding_mask": padded(), "attn_mask": causal(7)},
    "causal and padding": {
        "key_padding_mask": padded(), "attn_mask": causal(7), "is_causal": True, "need_weights": False,
    },
}  # fmt: skip


def assert_same(one: tuple[Tensor, Tensor | None], two: tuple[Tensor, Tensor | None]) -> None:
    torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=1e-5)
    assert (one[1] is None) == (two[1] is None)
    if one[1] is not None and two[1] is not None:
        torch.testing.assert_close(one[1], two[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", [{"batch_first": True}, {}, {"bias": False}, {"kdim": 10, "vdim": 9}], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_nothing_removed(call: str, options: dict[str, Any], training: bool) -> None:
    module = dense(**options).train(training)
    same = sliced(module)
    widths = (DIM, options.get("kdim", DIM), options.get("vdim", DIM))
    three = [normal(3, 7, width, seed=k) for k, width in enumerate(widths)]
    if not options.get("batch_first"):
        three = [one.transpose(0, 1) for one in three]
    assert_same(same(*three, **CALLS[call]), module(*three, **CALLS[call]))
    if widths == (DIM,) * 3:  # queries that are keys and values too
        assert_same(same(*three[:1] * 3, **CALLS[call]), module(*three[:1] * 3, **CALLS[call]))
        assert_same(
            same(three[0], three[1], three[1], **CALLS[call]), module(three[0], three[1], three[1], **CALLS[call])
        )


@pytest.mark.parametrize("call", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
@pytest.mark.parametrize("masks", [{}, {"attn_mask": normal(HEADS, 5, 7)}, {"key_padding_mask": padded()[1]}], ids=len)
def test_one_example_without_a_batch(call: dict[str, Any], masks: dict[str, Any]) -> None:
    module = dense().eval()
    query, key = normal(5, DIM), normal(7, DIM, seed=2)
    assert_same(sliced(module)(query, key, key, **call, **masks), module(query, key, key, **call, **masks))


def test_gradients_and_dropout() -> None:
    module = dense(dropout=0.4, batch_first=True)
    same, x = sliced(module), normal(3, 7, DIM)
    for one in (module, same):
        torch.manual_seed(3)
        one(x, x, x)[0].square().sum().backward()
    for (name, p), q in zip(module.named_parameters(), same.parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    assert not torch.equal(same(x, x, x, need_weights=False)[0], same(x, x, x, need_weights=False)[0])


def test_wrong_masks_are_refused() -> None:
    same, x = sliced(dense(batch_first=True)), normal(3, 7, DIM)
    with pytest.raises(ValueError, match=r"holds 9 masks for 3 examples of 4 heads"):
        same(x, x, x, attn_mask=normal(9, 7, 7))
    with pytest.raises(RuntimeError, match="hint"):
        same(x, x, x, is_causal=True)


class Cross(nn.Module):
    """Attention of one signal to another, all widths different."""

    def __init__(self, weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.weights = weights
        self.queries, self.memory = nn.Linear(6, DIM), nn.Linear(5, 10)
        self.attn = nn.MultiheadAttention(DIM, HEADS, kdim=10, vdim=10, batch_first=True, **options)
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        m = self.memory(memory)
        return self.out(self.attn(self.queries(x), m, m, need_weights=self.weights)[0])


SIGNALS = (normal(2, 5, 6), normal(2, 7, 5))


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=str)
def test_heads_widths_and_what_they_read_go_together(options: dict[str, Any], weights: bool, tmp_path: Path) -> None:
    make = seeded()(lambda: Cross(weights, **options))
    model = make()
    graph = proven(model, SIGNALS, ["heads", "head_dims", "neurons"])
    found = Counter(group.unit for group in graph.groups)
    assert found["head"] == 1
    assert found["head dim"] >= 1
    assert found["neuron"] >= 2  # queries and memory, and what attention gives
    for seed in range(4):
        small = removed(model, graph, SIGNALS, seed)
        attn = small.attn
        assert type(attn) is SlicedAttention
        assert attn.num_heads < HEADS
        assert max(attn.head_dim, attn.value_dim) <= 6
        assert attn.scale == 6**-0.5
        assert (attn.embed_dim, attn.kdim) == (small.queries.out_features, small.memory.out_features)
        assert attn.out_proj.in_features == attn.num_heads * attn.value_dim
        assert [name for name, _ in small.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert f"num_heads={attn.num_heads}" in repr(attn)
        assert_comes_back(small, make(), SIGNALS, tmp_path / f"{seed}.prunus")


def test_queries_and_values_may_differ_in_width() -> None:
    model = seeded()(Cross)()
    graph = proven(model, SIGNALS, "head_dims")
    assert len(graph.groups) == 2
    widths = {(m.head_dim, m.value_dim) for m in (removed(model, graph, SIGNALS, seed).attn for seed in range(4))}
    assert any(one != two for one, two in widths)


def test_a_sliced_one_is_copied_pickled_trained_and_shrunk_again() -> None:
    entry = ZOO["torch_mha"]
    model = entry.make().eval()
    graph = proven(model, entry.inputs(), ["heads", "head_dims"])
    keep = prunus.Keep(graph, {group.name: torch.tensor([k != 1 for k in range(group.size)]) for group in graph.groups})
    small = slice_model(model, graph, keep)
    assert (small.attn.num_heads, small.attn.head_dim) == (3, 5)
    for one in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        torch.testing.assert_close(one(*entry.inputs()), small(*entry.inputs()))
    small.train()(*entry.inputs()).square().sum().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in small.attn.parameters())
    again = proven(small.eval(), entry.inputs(), ["heads", "head_dims"])
    assert sorted(again.sizes.values()) == [3, 5, 5]  # its queries and values may now differ
    assert removed(small, again, entry.inputs()).attn.scale == 6**-0.5


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_keys_that_are_always_there_go_to_the_graph_form(options: dict[str, Any]) -> None:
    model = seeded()(lambda: Cross(**options))()
    graph = analyse(model, SIGNALS, units="heads")
    assert type(slice_model(model, graph, drawn(graph, 0)).attn) is nn.MultiheadAttention
    auto = analyse_and_prove(model, SIGNALS, units="heads")
    assert (auto.form, auto.sizes) == ("graph", {"attn": HEADS})
    assert not analyse_and_prove(model, SIGNALS, units="heads", form="eager").groups


def test_attention_of_ones_own_is_left_alone() -> None:
    class Own(nn.MultiheadAttention):
        pass

    model = seeded()(Cross)()
    model.attn.__class__ = Own
    assert not analyse_and_prove(model, SIGNALS, units="heads", form="eager").groups


class Encoder(nn.Module):
    """PyTorch's encoder as it comes: in inference it takes fused kernels, and sentences without their padding."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(6, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, batch_first=True, norm_first=norm_first, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.out(self.encoder(self.proj(x), src_key_padding_mask=padding))


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def even(graph: prunus.Graph) -> prunus.Keep:
    """Two heads of four: PyTorch's fused kernels want an even number."""
    first = {g.name: torch.arange(g.size) < 2 for g in graph.groups if g.unit == "head"}
    return prunus.Keep(graph, drawn(graph, 0).units | first)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fused_encoder_is_not_taken_and_padding_stays_zero(norm_first: bool) -> None:
    with quietly():
        model = seeded()(lambda: Encoder(norm_first))().eval()
        example = (normal(3, 7, 6), padded())
        graph = proven(model, example, ["heads", "neurons"])
        assert Counter(g.unit for g in graph.groups)["head"] == 2
        keep = even(graph)
        small = slice_model(model, graph, keep)
        assert all(layer.self_attn.num_heads == 2 for layer in small.encoder.layers)
        masked = copy.deepcopy(model)
        masked.load_state_dict(mask_sites(graph, keep, tensors(model)))
        with torch.no_grad():  # as a user runs it
            fused, own = masked(*example), small(*example)
        torch.testing.assert_close(own, fused, rtol=1e-4, atol=1e-5)
        same = [max_rel_diff(outputs(masked, Inputs.of(example)), outputs(small, Inputs.of(example)))]
        assert max(same) < 1e-5
        small.train()(*example).sum().backward()
    assert all(p.grad is not None for p in small.parameters())


def test_padded_sentences_pass_both_doors() -> None:
    with quietly():
        model = seeded()(Encoder)().eval()
        example = (normal(3, 7, 6), padded())
        gated = prunus.gate(model, example, form="eager")
        with torch.no_grad():
            gated.log_alpha.normal_(std=4.0, generator=torch.Generator().manual_seed(1))
        small, receipt = prunus.shrink(gated, example, seconds=0.0, batches=3)
    assert receipt["exactness"]["ok"]
    assert isinstance(small.encoder.layers[0].self_attn, SlicedAttention)


def test_decoders_attend_to_a_memory() -> None:
    make: Callable[[], nn.Module] = ZOO["torch_decoder"].make
    model, example = make().eval(), ZOO["torch_decoder"].inputs()
    graph = proven(model, example, ["heads", "head_dims", "neurons"])
    small = removed(model, graph, example)
    kinds = [type(layer.self_attn) for layer in small.decoder.layers]
    assert kinds == [SlicedAttention, SlicedAttention]
