"""PyTorch's multi-head attention with heads or head dimensions gone.

`nn.MultiheadAttention` insists that its heads together are as wide as its input, so where some are gone the module
becomes a `SlicedAttention`: the same parameters under the same names, the same call, the same answers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunus.surgery.known.kept import Kept, along, known


class SlicedAttention(nn.MultiheadAttention):
    """Multi-head attention whose heads may be fewer and narrower than its input is wide.

    softmax(q k^T scale) v, head by head (Vaswani et al. 2017, eq. 1), where `scale` is still that of the dimensions
    that a head had at first. PyTorch's fused kernels for inference know no such module and are not taken.
    """

    scale: float
    value_dim: int  # of a head's values; `head_dim` is that of its queries and keys

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; see `torch.nn.MultiheadAttention.forward`. Weights are those of the heads that are there."""
        if query.is_nested:
            return self._nested(query)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, which is missing.")
        batched = query.dim() == 3
        q, k, v = (self._heads(one, batched) for one in self._projected(query, key, value))
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None  # the hint is enough
        else:
            mask, is_causal = self._mask(attn_mask, key_padding_mask, q, k), False
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (q * self.scale) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout)
            read = weights @ v
        else:
            read = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=self.scale)
        result = F.linear(read.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return result.squeeze(0), None if weights is None else weights.squeeze(0)
        return result if self.batch_first else result.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values of all heads."""
        widths = [self.num_heads * width for width in (self.head_dim, self.head_dim, self.value_dim)]
        bias = self.in_proj_bias
        if self.in_proj_weight is not None:
            if query is key and key is value:
                return F.linear(query, self.in_proj_weight, bias).split(widths, -1)
            weights: Sequence[Tensor] = self.in_proj_weight.split(widths)
        else:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        biases: Sequence[Tensor | None] = [None] * 3 if bias is None else bias.split(widths)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def _heads(self, x: Tensor, batched: bool) -> Tensor:
        """(batch, heads, positions, width of a head)."""
        if not batched:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Both masks as what is added to the scores."""
        total: Tensor | None = None
        if attn_mask is not None:
            total = _additive(attn_mask, q)
            if total.dim() == 3:
                if total.shape[0] != q.shape[0] * self.num_heads:
                    raise ValueError(
                        f"attn_mask holds {total.shape[0]} masks for {len(q)} examples of {self.num_heads} heads each."
                    )
                total = total.unflatten(0, (-1, self.num_heads))
        if padding is not None:
            padding = _additive(padding, q).view(-1, 1, 1, k.shape[2])
            total = padding if total is None else total + padding
        return total

    def _nested(self, query: Tensor) -> tuple[Tensor, None]:
        """Sentences without their padding, as `nn.TransformerEncoder` gives them in inference."""
        lengths = [len(one) for one in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        places = torch.arange(padded.shape[1], device=padded.device)
        padding = places >= torch.tensor(lengths, device=padded.device).unsqueeze(1)
        result, _ = self.forward(padded, padded, padded, padding, need_weights=False)
        return torch.nested.as_nested_tensor([one[:n] for one, n in zip(result, lengths, strict=True)]), None

    def extra_repr(self) -> str:
        """How many heads there are, and how wide."""
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, value_dim={self.value_dim}"


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
    return mask.to(like.dtype)


@known(nn.MultiheadAttention)
def attention(module: Any, kept: Kept) -> None:
    """Count heads and their dimensions in the rows of the projections; queries and keys must have as many of both.

    A subclass with code of its own, and keys and values that are always there (`add_bias_kv`, `add_zero_attn`), are
    left as they are.
    """
    if type(module) not in (nn.MultiheadAttention, SlicedAttention):
        return
    heads, width = module.num_heads, module.head_dim
    depth = module.value_dim if isinstance(module, SlicedAttention) else width
    rows: Sequence[Tensor | None]
    if module._parameters.get("in_proj_weight") is not None:
        mask, read = kept.mask("in_proj_weight", 0), [kept.mask("in_proj_weight", 1)]
        rows = [None] * 3 if mask is None else mask.split([heads * width, heads * width, heads * depth])
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        rows, read = [kept.mask(name, 0) for name in names], [kept.mask(name, 1) for name in names]
    q, k, v = (None if m is None else along(m, heads, d) for m, d in zip(rows, (width, width, depth), strict=True))
    if q is None or k is None or v is None or q != k or q[0] != v[0] or any(m is None for m in read):
        return
    widths = [int(m.sum()) for m in read if m is not None]
    if (q[0], q[1], v[1]) == (heads, width, depth) and widths[0] == module.embed_dim:
        module.kdim, module.vdim = widths[len(widths) // 2], widths[-1]
        return
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return
    if not isinstance(module, SlicedAttention):
        module.__class__ = SlicedAttention
        module.scale = width**-0.5
        module._qkv_same_embed_dim = False  # what PyTorch's encoder layers ask before they take their fused kernels
    module.num_heads, module.head_dim, module.value_dim = q[0], q[1], v[1]
    module.embed_dim, module.kdim, module.vdim = widths[0], widths[len(widths) // 2], widths[-1]
