"""Operation by operation: what each lets free, and that it is removed exactly in both forms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_zoo import Net
from test_random_nets import random_keep, tensors
from torch import Tensor, nn
from torch.nn import functional as F

import prunus
from prunus.cost import Cost
from prunus.graph import analyse
from prunus.measure import count_macs
from prunus.surgery import Exported, Inputs, mask_sites, outputs, prove, slice_model
from prunus.surgery.verify import max_rel_diff

EVERYTHING = ("structured", "head_dims", "width")
Case = tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, int]]


def rows(f: Any, sizes: dict[str, int], made: int = 8, read: int = 8, **layers: Any) -> Case:
    """Between two linear layers, on rows of numbers."""

    def make() -> nn.Module:
        return Net(lambda m, x: m.b(f(m, m.a(x))), a=nn.Linear(6, made), b=nn.Linear(read, 4), **built(layers))

    return make, (3, 6), sizes


def words(f: Any, sizes: dict[str, int], made: int = 8, read: int = 8, **layers: Any) -> Case:
    """The same on sequences of five."""
    make, _, _ = rows(f, sizes, made, read, **layers)
    return make, (3, 5, 6), sizes


def maps(f: Any, sizes: dict[str, int], made: int = 8, read: int = 8, **layers: Any) -> Case:
    """Between two convolutions."""

    def make() -> nn.Module:
        return Net(lambda m, x: m.b(f(m, m.a(x))), a=nn.Conv2d(3, made, 1), b=nn.Conv2d(read, 4, 1), **built(layers))

    return make, (2, 3, 6, 6), sizes


def built(layers: dict[str, Any]) -> dict[str, Any]:
    return {
        name: nn.Parameter(torch.randn(layer)) if isinstance(layer, tuple) else layer()
        for name, layer in layers.items()
    }


def heads(x: Tensor, count: int, each: int) -> Tensor:
    return x.view(x.size(0), -1, count, each).transpose(1, 2)


ALL = {"a": 8}
PARTS = {"a": 2, "a#2": 4}

CASES: dict[str, Case] = {
    # ---- the same numbers at other places
    "narrow to a part": rows(lambda m, x: x.narrow(1, 2, 4), {"a": 4}, read=4),
    "repeat": rows(lambda m, x: x.repeat(1, 2), ALL | {"b.inputs": 16}, read=16),
    "tile": rows(lambda m, x: x.tile(2), ALL | {"b.inputs": 16}, read=16),
    "repeat_interleave": rows(lambda m, x: x.repeat_interleave(2, 1), ALL | {"b.inputs": 16}, read=16),
    "expand": words(lambda m, x: x.unsqueeze(1).expand(-1, 2, -1, -1).mean(1), ALL),
    "expand to numbers": words(lambda m, x: x.unsqueeze(1).expand(3, 2, 5, 8).mean(1), ALL),
    "stack and unbind": words(lambda m, x: torch.stack([x, 2 * x], 0).unbind(0)[1], ALL),
    "stack, flatten": words(lambda m, x: torch.stack([x, x.tanh()], -1).flatten(-2), ALL | {"b.inputs": 16}, read=16),
    "movedim": words(lambda m, x: x.movedim(-1, 0).movedim(0, -1), ALL),
    "unflatten": words(lambda m, x: x.unflatten(-1, (2, 4)).flatten(-2), PARTS),
    "unflatten to what is left": words(lambda m, x: x.unflatten(-1, (2, -1)).mT.flatten(-2), PARTS),
    "view to what is left": words(lambda m, x: x.view(3, 5, -1, 4).transpose(2, 3).reshape(3, 5, 8), PARTS),
    "view with the batch": words(
        lambda m, x: x.view(x.size(0) * 5, 2, 4).transpose(1, 2).reshape(x.size(0), 5, 8), PARTS
    ),
    "groups beside the batch": words(
        lambda m, x: heads(heads(x, 2, 4).reshape(x.size(0) * 2, 5, 4).tanh().view(-1, 2, 5, 4).flatten(2), 5, 4)
        .transpose(1, 2).transpose(1, 2).transpose(2, 3).flatten(3).reshape(x.size(0), -1, 8)[:, :5], PARTS
    ),
    "chunk": rows(lambda m, x: torch.cat(x.chunk(2, 1)[::-1], 1), {"a": 4, "a#2": 4}),
    "uneven chunks": rows(lambda m, x: torch.cat(x.chunk(3, 1)[::-1], 1), {"a": 3, "a#2": 3, "a#3": 2}),
    "added chunks": rows(lambda m, x: sum(x.chunk(3, 1)), {"a": 3}, made=9, read=3),
    "tensor_split": rows(lambda m, x: torch.cat(x.tensor_split(3, 1)[::-1], 1), {"a": 3, "a#2": 3, "a#3": 2}),
    "tensor_split at places": rows(
        lambda m, x: torch.cat(x.tensor_split((2, 5), 1)[::-1], 1), {"a": 2, "a#2": 3, "a#3": 3}
    ),
    "split": rows(lambda m, x: torch.cat(x.split([3, 5], -1)[::-1], -1), {"a": 3, "a#2": 5}),
    "slices from the end": rows(lambda m, x: torch.cat([x[:, -3:], x[:, :-3]], 1), {"a": 5, "a#2": 3}),
    "a slice": words(lambda m, x: x[..., 1:3], {"a": 2}, read=2),
    "pad": rows(lambda m, x: F.pad(x, (1, 2)), ALL, read=11),
    "pad with a number": rows(lambda m, x: F.pad(x, (1, 2), value=3.0), ALL, read=11),
    "maps of zeros and pixels": maps(lambda m, x: F.pad(x, (1, 1, 1, 1, 2, 0)), ALL, read=10),
    "reflected pixels": maps(lambda m, x: F.pad(x, (1, 1, 1, 1), mode="reflect"), ALL),
    "replicated pixels": maps(lambda m, x: F.pad(x, (1, 1, 1, 1), mode="replicate"), ALL),
    "wrapped pixels": maps(lambda m, x: F.pad(x, (1, 1, 1, 1), mode="circular"), ALL),
    "pixel_shuffle": maps(lambda m, x: F.pixel_shuffle(x, 2), {"a": 2}, read=2),
    "pixel_unshuffle": maps(lambda m, x: F.pixel_unshuffle(x, 2), ALL, read=32),
    "channel_shuffle": maps(lambda m, x: F.channel_shuffle(x, 2), PARTS),
    "rolled pixels": maps(lambda m, x: x.roll((1, 2), (2, 3)), ALL),
    "windows": maps(
        lambda m, x: x.view(-1, 8, 2, 3, 2, 3).permute(0, 2, 4, 3, 5, 1).reshape(-1, 9, 8).tanh()
        .view(-1, 2, 2, 3, 3, 8).permute(0, 5, 1, 3, 2, 4).reshape(-1, 8, 6, 6), ALL
    ),
    "flattened and back": maps(lambda m, x: x.flatten(1).view(x.size(0), 8, 6, 6), ALL),
    "squeeze": maps(lambda m, x: x.mean((2, 3), keepdim=True).squeeze(3).squeeze(2)[:, :, None, None], ALL),
    "picked words": words(lambda m, x: x[:, [0, 3]], ALL),
    "gathered words": words(lambda m, x: x.gather(1, torch.zeros(3, 2, 8, dtype=torch.long)), ALL),
    "gathered words, expanded": words(
        lambda m, x: x.gather(1, torch.zeros(3, 2, 1, dtype=torch.long).expand(-1, -1, x.size(-1))), ALL
    ),
    "glu": rows(lambda m, x: F.glu(x), {"a": 4}, read=4),
    # ---- elementwise, and over what is no unit
    "where": rows(lambda m, x: torch.where(x > 0, x, m.t), ALL, t=(8,)),
    "lerp": rows(lambda m, x: torch.lerp(x, x.tanh(), 0.3), ALL),
    "addcmul": rows(lambda m, x: torch.addcmul(x, x, x.tanh(), value=0.5), ALL),
    "a mask of words": words(lambda m, x: x * (torch.arange(5) > 2)[None, :, None], ALL),
    "topk of words": words(lambda m, x: x.topk(2, 1).values, ALL),
    "deviation over words": words(lambda m, x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), ALL),
    "softmax in groups": words(lambda m, x: x.view(3, 5, 2, 4).softmax(3).flatten(2), {"a": 2}),
    "maxout": rows(lambda m, x: x.view(-1, 4, 2).amax(-1), {"a": 4}, read=4),
    "upsampled": maps(lambda m, x: F.interpolate(x, size=(9, 9), mode="bilinear", align_corners=False), ALL),
    "grid_sample": maps(
        lambda m, x: F.grid_sample(x, torch.zeros(x.size(0), 4, 4, 2, dtype=x.dtype), align_corners=False), ALL
    ),
    "max_pool with indices": maps(lambda m, x: F.max_pool2d(x, 2, return_indices=True)[0], ALL),
    # ---- over units: dead ones must be zero
    "sum": words(lambda m, x: x / (1 + x.sum(-1, keepdim=True) ** 2), ALL),
    "mean": words(lambda m, x: x * x.mean(-1, keepdim=True), ALL),
    "mean of all": words(lambda m, x: x * x.mean(), ALL),
    "mean of groups": rows(lambda m, x: x.view(-1, 2, 4).mean(1), PARTS, read=4),
    "mean over maps and rows": maps(lambda m, x: x * x.mean((1, 2), keepdim=True), ALL),
    "rms_norm": words(lambda m, x: m.g(x), ALL, g=lambda: nn.RMSNorm(8, eps=1e-6)),
    "rms_norm with the least epsilon": words(lambda m, x: m.g(x), ALL, g=lambda: nn.RMSNorm(8)),
    "rms_norm by function": words(lambda m, x: F.rms_norm(x, (8,), eps=1e-5), ALL),
    "products with itself": words(lambda m, x: (x @ x.mT) @ x, ALL),
    "baddbmm": words(lambda m, x: torch.baddbmm(x, torch.bmm(x, x.mT), x), ALL),
    "einsum over all": words(lambda m, x: x * torch.einsum("bni,bni->b", x, x)[:, None, None], ALL),
    # ---- weights
    "addmm": rows(lambda m, x: torch.addmm(m.t, x, m.w), ALL | {"w": 8}, w=(8, 8), t=(8,)),
    "x W": words(lambda m, x: x @ m.w, ALL | {"w": 8}, w=(8, 8)),
    "x W, a W an example": words(lambda m, x: x @ m.w, ALL | {"w": 8}, w=(3, 8, 8)),
    "W x": words(lambda m, x: (m.w @ x.mT).mT, ALL | {"w": 8}, w=(8, 8)),
    "einsum": words(lambda m, x: torch.einsum("bni,oi->bno", x, m.w), ALL | {"w": 8}, w=(8, 8)),
    "einsum by heads": words(
        lambda m, x: torch.einsum("bnhi,hoi->bnho", x.view(3, 5, 2, 4), m.w).flatten(2), PARTS | {"w": 4}, w=(2, 4, 4)
    ),
    "outer product": rows(lambda m, x: torch.einsum("bi,bj->bij", x, x.tanh()).flatten(1), ALL, read=64),
    "grouped convolution of words": words(
        lambda m, x: m.c(x.mT).mT, PARTS | {"c": 4}, c=lambda: nn.Conv1d(8, 8, 3, padding=1, groups=2)
    ),
    "transposed, grouped": maps(
        lambda m, x: m.c(x), {"a": 4, "a#2": 2, "c": 2}, c=lambda: nn.ConvTranspose2d(8, 8, 3, padding=1, groups=4)
    ),
    "depthwise by function": maps(lambda m, x: F.conv2d(x, m.w, None, 1, 1, 1, 8), ALL, w=(8, 1, 3, 3)),
    "grouped by function": maps(
        lambda m, x: F.conv2d(x, m.w, None, 1, 1, 1, 2), PARTS | {"w": 4}, w=(8, 4, 3, 3)
    ),
    "standardised weight": maps(
        lambda m, x: F.conv2d(x, m.w - m.w.mean((1, 2, 3), keepdim=True), padding=1), ALL, w=(8, 8, 3, 3)
    ),
    "group_norm": maps(lambda m, x: m.g(x), {"a": 2}, g=lambda: nn.GroupNorm(2, 8)),
    "group_norm by function": maps(lambda m, x: F.group_norm(x, 4), {"a": 4}),
    "instance_norm": maps(lambda m, x: m.g(x), ALL, g=lambda: nn.InstanceNorm2d(8, affine=True)),
    "layer_norm over pixels": maps(lambda m, x: F.layer_norm(x, (6, 6)), ALL),
    "batch_norm by function": maps(lambda m, x: F.batch_norm(x, None, None, training=True), ALL),
    "prelu": maps(lambda m, x: m.p(x), ALL, p=lambda: nn.PReLU(8)),
    # ---- recurrences and attention
    "lstm in both directions": words(
        lambda m, x: m.r(x)[0], ALL | {"b.inputs": 8}, r=lambda: nn.LSTM(8, 4, batch_first=True, bidirectional=True)
    ),
    "lstm projected": words(
        lambda m, x: m.r(x)[0], ALL | {"b.inputs": 8}, r=lambda: nn.LSTM(8, 9, proj_size=8, batch_first=True)
    ),
    "gru of two layers": words(lambda m, x: m.r(x)[0], ALL | {"b.inputs": 8}, r=lambda: nn.GRU(8, 8, num_layers=2)),
    "the last state": words(
        lambda m, x: m.r(x)[1][0][-1], ALL | {"b.inputs": 8}, r=lambda: nn.LSTM(8, 8, batch_first=True)
    ),
    "attention": words(lambda m, x: F.scaled_dot_product_attention(x, x.tanh(), x), ALL),
    "attention with a scale": words(lambda m, x: F.scaled_dot_product_attention(x, x.tanh(), x, scale=0.3), ALL),
    "attention with a mask": words(
        lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril()), ALL
    ),
    "attention with a bias of its heads": words(
        lambda m, x: F.scaled_dot_product_attention(*[heads(t, 2, 4) for t in (x, x.tanh(), x)], attn_mask=m.t)
        .transpose(1, 2).flatten(2), PARTS, t=(2, 5, 5)
    ),
    "attention with grouped queries": words(
        lambda m, x: F.scaled_dot_product_attention(
            heads(m.q(x), 4, 2), heads(x[..., :4], 2, 2), heads(x[..., 4:], 2, 2), enable_gqa=True
        ).transpose(1, 2).flatten(2), {"a": 2, "a#2": 2, "a#3": 2, "q": 2}, q=lambda: nn.Linear(8, 8)
    ),
    "multi-head attention": words(
        lambda m, x: m.m(x, x, x, need_weights=True)[0], ALL | {"m": 2, "m#2": 4, "m.out_proj": 8},
        m=lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    ),
    "multi-head attention with more in it": words(
        lambda m, x: m.m(x, x, x)[0], ALL | {"m": 2, "m#2": 4, "m.out_proj": 8},
        m=lambda: nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),
    ),
}  # fmt: skip

REFUSED: dict[str, Case] = {  # what the analysis calls free and the proof refuses by name
    "narrow to all": rows(lambda m, x: x.narrow(1, 0, 8), ALL),
    "a written length": rows(lambda m, x: x.repeat_interleave(2, dim=-1, output_size=16), ALL, read=16),
    "less the mean": words(lambda m, x: x - x.mean(-1, keepdim=True), ALL),  # a dead unit would not be zero behind it
    "depthwise with a computed weight": maps(
        lambda m, x: F.conv2d(x, m.w - m.w.mean((2, 3), keepdim=True), None, 1, 1, 1, 8), ALL, w=(8, 1, 3, 3)
    ),
}


def prepared(case: Case) -> tuple[nn.Module, Tensor]:
    make, shape, _ = case
    torch.manual_seed(0)
    model = make().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.6)
    return model, torch.randn(shape, dtype=torch.float64)


def without_inputs(sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name != "a.inputs"}


@pytest.mark.parametrize("name", CASES)
def test_what_an_operation_lets_free(name: str) -> None:
    model, x = prepared(CASES[name])
    graph = analyse(model, (x,), units=EVERYTHING)
    assert without_inputs(graph.sizes) == CASES[name][2]
    assert Cost(graph).dense()["macs"] == count_macs(model, (x,))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_it_lets_free_is_removed_exactly(name: str) -> None:
    model, x = prepared(CASES[name])
    inputs = Inputs.of(x)
    graph = analyse(model, (x,), units=EVERYTHING)
    for form in ("auto", "graph"):
        assert prove(model, graph, x, form).sizes == graph.sizes
    exported, eager, whole = (
        Exported(model, inputs, training=False),
        prove(model, graph, x, "eager"),
        outputs(model, inputs),
    )
    effects = []
    for seed in range(4):
        keep = random_keep(graph, seed)
        masked = outputs(model, inputs, mask_sites(graph, keep, tensors(model)))
        small = exported.shrunk(graph, keep, slice_model(model, graph, keep, form="graph"))
        assert max_rel_diff(masked, outputs(small, inputs)) <= 1e-9
        assert Cost(graph).of(keep)["macs"] == count_macs(small, (x,))
        effects.append(max_rel_diff(whole, masked))
        if eager.groups:
            keep = random_keep(eager, seed)
            masked = outputs(model, inputs, mask_sites(eager, keep, tensors(model)))
            assert max_rel_diff(masked, outputs(slice_model(model, eager, keep), inputs)) <= 1e-9
    assert max(effects) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_removed_is_refused_by_name(name: str) -> None:
    model, x = prepared(REFUSED[name])
    graph = prove(model, analyse(model, (x,), units=EVERYTHING), x)
    assert "a" not in graph.sizes
    assert any("removal" in f.operation for f in graph.frozen)


def test_rms_norm_without_an_epsilon_of_its_own() -> None:
    """It takes that of its input's precision, which counts where numbers are small."""
    model, x = prepared(CASES["rms_norm with the least epsilon"])
    with torch.no_grad():
        model.get_parameter("a.weight").mul_(0.1)
        model.get_parameter("a.bias").mul_(0.1)
    for precision in (torch.float64, torch.float32):
        model, x = model.to(precision), x.to(precision)
        graph = prove(model, analyse(model, (x,), units=EVERYTHING), x, "graph")
        assert "a" in graph.sizes


def test_products_with_vectors_cost_what_is_counted() -> None:
    """Words pooled by their product with one learned vector."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.query = nn.Linear(6, 8), nn.Linear(8, 4), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).tanh()
            return self.b((x * (x @ self.query).softmax(1).unsqueeze(-1)).sum(1))

    x = torch.randn(3, 5, 6)
    gated = prunus.gate(Pooling(), x)
    assert gated.graph.sizes == {"a.inputs": 6, "a": 8}
    _, receipt = prunus.shrink(gated, x, batches=())
    assert receipt["exactness"]["ok"]


def test_spectral_norm_is_no_obstacle() -> None:
    """Its products of vectors with the weight are counted as PyTorch counts them."""
    norm = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 7))
    x = torch.randn(3, 6)
    gated = prunus.gate(nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(7, 5), nn.Linear(5, 2)), x)
    assert "3" in gated.graph.sizes
    _, receipt = prunus.shrink(gated, x, batches=())
    assert receipt["exactness"]["ok"]
