"""Layers of transformers (Hugging Face; read at 5.23), known by the names of their classes: it is never imported here.

Its attention modules are many and alike. They make queries, keys and values with layers of few names (`PROJECTIONS`,
`FUSED`), and hold their sizes under few names, each of which counts one thing wherever it occurs (`COUNTS`). Scales are
computed when a module is made, and stay those of the dimensions that a head had then.
"""

import copy
from dataclasses import dataclass
from math import sqrt
from typing import Any

from torch import Tensor, nn

from prunus.surgery.known.kept import Kept, along, own_weight, rescaled_weight

PROJECTIONS = (  # of queries, keys and values
    ("q_proj", "k_proj", "v_proj"),  # Llama, Mistral, Qwen, Whisper, BART, CLIP, ViT, …
    ("query", "key", "value"),  # BERT and what descends from it
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT, XLM
    ("q", "k", "v"),  # T5
    ("query_proj", "key_proj", "value_proj"),  # DeBERTa
)
FUSED = ("c_attn", "qkv", "qkv_proj")  # one behind the other in one layer: GPT-2, BLIP, Phi-3
COUNTS = {  # what an attention module's numbers count: `Heads`
    "num_heads": "queries",
    "num_attention_heads": "queries",
    "n_heads": "queries",
    "num_key_value_heads": "keys",
    "num_key_value_groups": "repeats",
    "head_dim": "width",
    "attention_head_size": "width",
    "key_value_proj_dim": "width",
    "all_head_size": "total",
    "inner_dim": "total",
    "split_size": "total",
    "embed_dim": "total",
}
CONFIGURED = {  # modules whose forward pass asks their config, and what for; they get a config of their own
    "Phi3Attention": ("num_attention_heads",),
    "MoonshineAttention": ("num_key_value_heads",),
    "ParakeetEncoderAttention": ("num_attention_heads",),
}
ROOT_MEAN_SQUARES = (  # beside those that are called RMSNorm
    "T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm", "LongT5LayerNorm", "SwitchTransformersLayerNorm",
    "Pix2StructLayerNorm", "Pop2PianoLayerNorm", "UdopLayerNorm",
)  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """How many heads an attention module has, how many heads of queries share one of keys, and how wide each is."""

    keys: int
    repeats: int
    width: int

    @property
    def queries(self) -> int:
        """Heads of queries."""
        return self.keys * self.repeats

    @property
    def total(self) -> int:
        """The width of all queries together."""
        return self.queries * self.width


def resize(module: Any, kept: Kept) -> None:
    """Set the numbers of a module of transformers; any other is left alone."""
    kind = next((k.__name__ for k in type(module).__mro__ if k.__module__.startswith("transformers.")), "")
    if kind == "Conv1D":
        module.nx, module.nf = module.weight.shape
    elif "Attention" in kind:
        _attention(module, kept, kind)
    elif "RMSNorm" in kind or kind in ROOT_MEAN_SQUARES:
        _root_mean_square(module, kept)


def _root_mean_square(module: Any, kept: Kept) -> None:
    """weight * x / sqrt(mean(x^2) + variance_epsilon), over the units that are left; see `layers.rms_norm`."""
    weight, mask = own_weight(module), kept.mask("weight", 0)
    if weight is None or mask is None or not isinstance(getattr(module, "variance_epsilon", None), float):
        return
    whole, left = mask.numel(), weight.numel()
    if left < whole:
        module.variance_epsilon *= whole / left
        rescaled_weight(module, kept, sqrt(whole / left))


def _attention(module: Any, kept: Kept, kind: str) -> None:
    """Count the heads that stay in what makes queries, keys and values, and say so wherever they are counted."""
    rows = _rows(module, kept)
    dense = None if rows is None else _dense(module, *rows)
    if rows is None or dense is None:
        return
    q = along(rows[0], dense.keys, dense.repeats, dense.width)
    k, v = (along(row, dense.keys, dense.width) for row in rows[1:])
    if q is None or k is None or k != v or k != (q[0], q[2]):
        return
    now = Heads(*q)
    if now == dense:
        return
    _put(module, COUNTS, dense, now)
    if kind in CONFIGURED:
        module.config = copy.copy(module.config)
        _put(module.config, CONFIGURED[kind], dense, now)


def _put(holder: Any, names: Any, dense: Heads, now: Heads) -> None:
    for name in names:
        held = getattr(holder, name, None)
        if type(held) is int and held == getattr(dense, COUNTS[name]):  # it counts what its name says
            setattr(holder, name, getattr(now, COUNTS[name]))


def _rows(module: nn.Module, kept: Kept) -> tuple[Tensor, Tensor, Tensor] | None:
    """Which rows of queries, keys and values stay."""
    for names in PROJECTIONS:
        if all(isinstance(getattr(module, name, None), nn.Module) for name in names):
            q, k, v = (_made(module, name, kept) for name in names)
            return None if q is None or k is None or v is None else (q, k, v)
    for name in FUSED:
        if isinstance(getattr(module, name, None), nn.Module):
            every = _made(module, name, kept)
            if every is None:
                return None
            if isinstance(getattr(module, "q_attn", None), nn.Module):  # GPT-2's cross attention
                q, (k, v) = _made(module, "q_attn", kept), every.chunk(2)
                return None if q is None else (q, k, v)
            keys, width = getattr(module, "num_key_value_heads", None), getattr(module, "head_dim", None)
            if not isinstance(keys, int) or not isinstance(width, int):
                return _three(every)
            return every[: -2 * keys * width], every[-2 * keys * width : -keys * width], every[-keys * width :]
    return None


def _three(every: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = every.chunk(3)
    return q, k, v


def _made(module: nn.Module, name: str, kept: Kept) -> Tensor | None:
    layer = getattr(module, name)
    return kept.mask(f"{name}.weight", 1 if type(layer).__name__ == "Conv1D" else 0)


def _dense(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Heads | None:
    """The heads that a module was made with; None where its numbers do not say, or not this."""
    held = {COUNTS[name]: getattr(module, name) for name in COUNTS if type(getattr(module, name, None)) is int}
    width = held.get("width")
    if width is None and held.get("queries"):
        width = q.numel() // held["queries"]
    if not width or k.numel() != v.numel() or k.numel() % width or q.numel() % k.numel():
        return None
    return Heads(k.numel() // width, q.numel() // k.numel(), width)
