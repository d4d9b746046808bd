"""Setting the literals of an exported graph: an entry an operation that holds a size, read off its axis."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node as FxNode

from prunus.axes import Keep
from prunus.graph import Analysis, Branch, Node, Ref, Traced, Var, find, resolve
from prunus.terms import groups_of

SIZES = {  # where an operation holds the sizes of its result
    "view": 1, "reshape": 1, "_unsafe_view": 1, "expand": 1, "broadcast_to": 1, "zeros": 0, "ones": 0, "full": 0,
    "empty": 0, "new_zeros": 1, "new_ones": 1, "new_full": 1, "new_empty": 1,
}  # fmt: skip
SPLITS = ("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
GROUPS = 6  # the argument of a convolution that counts its groups


class Rewriting:
    """What it takes to set literals: the walked analysis, the names of groups, the Keep, the nodes to be changed."""

    def __init__(
        self,
        state: Analysis,
        names: Mapping[int, tuple[str, str]],
        keep: Keep,
        nodes: Mapping[FxNode, FxNode],
    ) -> None:
        self.state = state
        self.names = names
        self.keep = keep
        self.nodes = nodes
        self.gone: set[FxNode] = set()  # operations of branches that are cut
        self._kept: dict[Any, torch.Tensor] = {}

    def shrinks(self, var: Var) -> bool:
        """Does anything go along an axis?"""
        return bool(groups_of(resolve(var, self.names))) and self.count(var) != find(var).size

    def kept(self, var: Var) -> torch.Tensor:
        """Which positions of an axis stay."""
        term = resolve(var, self.names)
        if term not in self._kept:
            self._kept[term] = self.keep.positions(term)
        return self._kept[term]

    def count(self, var: Var) -> int:
        """How many positions of an axis stay."""
        return int(self.kept(var).sum())

    def before(self, var: Var, position: int) -> int:
        """How many of an axis' first positions stay."""
        return int(self.kept(var)[:position].sum())

    def apply(self, node: Node) -> None:
        """Set what one operation holds."""
        if node.fx is None or node.fx not in self.nodes:
            return
        fx = self.nodes[node.fx]
        if node.base in ("_assert_tensor_metadata", "_assert_scalar"):  # checks of what may now be otherwise
            fx.graph.erase_node(fx)
            return
        out = self.state.dims[node.name]
        if not node.op.startswith("aten."):
            return
        if node.base in ("view", "_unsafe_view"):  # export writes view where its own strides allowed one
            fx.target = torch.ops.aten.reshape.default
        if node.base == "einsum":  # PyTorch's own function, which counting recognises
            fx.target = torch.einsum
            fx.args = (fx.args[0], *fx.args[1])  # type: ignore[misc]
        if node.base in SIZES:
            self._sizes(fx, SIZES[node.base], out[0])
        elif node.base in CONVOLUTIONS:
            self._groups(node, fx)
        elif node.base in SPLITS:
            self._split(node, fx, out)
        else:
            rewrite = OTHERS.get(node.base)
            if rewrite is not None:
                rewrite(self, node, fx, out[0])

    def select(self, state: Analysis, weight: str, name: str) -> None:
        """Put an index selection before the layer that reads with a weight; the indices are one more input."""
        (contraction,) = [c for c in state.contractions if c.tensor == weight]
        assert contraction.node.fx is not None
        fx = self.nodes[contraction.node.fx]
        graph = fx.graph
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(last):
            index = graph.placeholder("at_" + name.replace(".", "_"))
        with graph.inserting_before(fx):
            chosen = graph.call_function(torch.ops.aten.index_select.default, (fx.args[0], -1, index))
        fx.update_arg(0, chosen)

    def cut(self, branch: Branch, traced: Traced) -> None:
        """Take a branch out: what stays takes the place of the addition."""
        by_name = {node.name: node for node in traced.nodes}
        node = by_name[branch.addition]
        assert node.fx is not None
        addition = self.nodes[node.fx]
        stays = addition.args[[ref for ref in node.args if isinstance(ref, Ref)].index(branch.stays)]
        assert isinstance(stays, FxNode)
        if any(_changes(user) for user in addition.users):  # what changes the sum in place must not change what stays
            with addition.graph.inserting_before(addition):
                stays = addition.graph.call_function(torch.ops.aten.clone.default, (stays,))
        addition.replace_all_uses_with(stays)
        for name in [branch.addition, *branch.nodes]:
            fx = by_name[name].fx
            if fx is not None:
                self.gone.add(self.nodes[fx])

    def stays(self, fx: FxNode) -> bool:
        """Must an operation stay though nobody uses its result? All that stood in no branch: its cost was counted."""
        if fx.op != "call_function" or fx in self.gone:
            return fx.op in ("placeholder", "output")
        return isinstance(fx.meta.get("val"), torch.Tensor | tuple | list) or _changes(fx)

    def dims(self, node: Node, argument: int) -> list[Var]:
        """The axes of an argument."""
        return self.state.of(node.args[argument])

    def _sizes(self, fx: FxNode, place: int, out: list[Var]) -> None:
        sizes = list(fx.args[place])  # type: ignore[arg-type]
        for k, var in enumerate(out):
            if sizes[k] == -1 or not self.shrinks(var):
                continue
            if isinstance(sizes[k], int):
                sizes[k] = self.count(var)
                continue
            with fx.graph.inserting_before(fx):  # a computed size: batch times heads, say
                times = fx.graph.call_function(operator.mul, (sizes[k], self.count(var)))
                sizes[k] = fx.graph.call_function(operator.floordiv, (times, find(var).size))
        fx.update_arg(place, sizes)

    def _groups(self, node: Node, fx: FxNode) -> None:
        name = self.state.tensor_of(node.args[1])
        owner = (name or "").rpartition(".")[0]
        if len(fx.args) > GROUPS and owner in self.state.split and fx.args[GROUPS] != 1:
            fx.update_arg(GROUPS, self.count(self.state.split[owner]))

    def _split(self, node: Node, fx: FxNode, out: list[list[Var]]) -> None:
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        if self.shrinks(self.dims(node, 0)[dim]):
            fx.target = torch.ops.aten.split_with_sizes.default
            fx.args = (fx.args[0], [self.count(dims[dim]) for dims in out], dim)
            fx.kwargs = {}


def _changes(fx: FxNode) -> bool:
    """Does an operation change one of its arguments?"""
    return isinstance(fx.target, torch._ops.OpOverload) and fx.target._schema.is_mutable


def _slice(r: Rewriting, node: Node, fx: FxNode, out: list[Var]) -> None:
    x = r.dims(node, 0)
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(x)
    size, taken = find(x[dim]).size, find(out[dim]).size
    if not r.shrinks(x[dim]) or taken == size:
        return
    start = (node.args[2] if len(node.args) > 2 else 0) or 0
    start = max(0, start + size if start < 0 else start)
    first, last = r.before(x[dim], start), r.before(x[dim], start + taken)
    fx.args = (fx.args[0], dim, first, last) if node.base == "slice" else (fx.args[0], dim, first, last - first)


def _unflatten(r: Rewriting, node: Node, fx: FxNode, out: list[Var]) -> None:
    dim = node.args[1] % len(r.dims(node, 0))
    sizes = list(fx.args[2])  # type: ignore[arg-type]
    for k, size in enumerate(sizes):
        if isinstance(size, int) and size != -1 and r.shrinks(out[dim + k]):
            sizes[k] = r.count(out[dim + k])
    fx.update_arg(2, sizes)


def _group_norm(r: Rewriting, node: Node, fx: FxNode, out: list[Var]) -> None:
    channels, groups = r.dims(node, 0)[1], node.args[1]
    each = find(channels).size // groups
    if r.shrinks(channels):
        fx.update_arg(1, r.count(channels) // each)


def _normalized(r: Rewriting, node: Node, fx: FxNode, out: list[Var]) -> None:
    """Root mean squares are over all units that were there: sqrt(S/D + e) = sqrt(K/D) sqrt(S/K + e D/K)."""
    shape = node.args[1]
    own = out[-len(shape) :]
    whole, left = math.prod(find(var).size for var in own), math.prod(r.count(var) for var in own)
    if left == whole:
        return
    eps = node.args[3] if len(node.args) > 3 else node.kwargs.get("eps")
    weight = fx.args[2] if len(fx.args) > 2 else fx.kwargs.get("weight")
    counts = [r.count(var) for var in own]
    if eps is None:
        fx.target = least_rms_norm
        fx.args = (fx.args[0], counts, weight, whole / left)
    else:
        fx.args = (fx.args[0], counts, weight, eps * whole / left)
    fx.kwargs = {}
    _scaled(fx, math.sqrt(whole / left))


def least_rms_norm(x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, times: float) -> torch.Tensor:
    """A root-mean-square norm with some times the epsilon that it takes by itself, which is its input's precision's."""
    return torch.nn.functional.rms_norm(x, shape, weight, torch.finfo(x.dtype).eps * times)


def _mean(r: Rewriting, node: Node, fx: FxNode, out: list[Var]) -> None:
    """A mean is over all units that were there: those that are gone were zero."""
    x = r.dims(node, 0)
    over = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = range(len(x)) if over is None or over == () else [over] if isinstance(over, int) else over
    whole = math.prod(find(x[k]).size for k in dims)
    left = math.prod(r.count(x[k]) for k in dims)
    if left != whole:
        _scaled(fx, left / whole)


def _scaled(fx: FxNode, factor: float) -> None:
    """Multiply a result by a number."""
    users = list(fx.users)
    with fx.graph.inserting_after(fx):
        scaled = fx.graph.call_function(torch.ops.aten.mul.Tensor, (fx, factor))
    for user in users:
        user.replace_input_with(fx, scaled)


def _attention(r: Rewriting, node: Node, fx: FxNode, out: list[Var]) -> None:
    """Without a scale given it is that of the dimensions that were there."""
    width = r.dims(node, 0)[-1]
    if r.shrinks(width) and fx.kwargs.get("scale") is None:
        fx.kwargs = dict(fx.kwargs) | {"scale": 1 / math.sqrt(find(width).size)}


def _pad(r: Rewriting, node: Node, fx: FxNode, out: list[Var]) -> None:
    x, amounts = r.dims(node, 0), list(fx.args[1])  # type: ignore[arg-type]
    for k in range(len(amounts) // 2):
        dim = len(x) - 1 - k
        first, last = amounts[2 * k : 2 * k + 2]
        if (first or last) and r.shrinks(out[dim]):
            size = find(x[dim]).size
            amounts[2 * k] = r.before(out[dim], first)
            amounts[2 * k + 1] = r.count(out[dim]) - r.before(out[dim], first + size)
    fx.update_arg(1, amounts)


def _shuffle(r: Rewriting, node: Node, fx: FxNode, out: list[Var]) -> None:
    channels = r.dims(node, 0)[1]
    if r.shrinks(channels):
        each = int(r.kept(channels).view(node.args[1], -1).any(0).sum())
        fx.update_arg(1, r.count(channels) // each)


OTHERS: dict[str, Callable[[Rewriting, Node, FxNode, list[Var]], None]] = {
    "slice": _slice,
    "narrow": _slice,
    "unflatten": _unflatten,
    "group_norm": _group_norm,
    "rms_norm": _normalized,
    "mean": _mean,
    "scaled_dot_product_attention": _attention,
    "constant_pad_nd": _pad,
    "pad": _pad,
    "channel_shuffle": _shuffle,
}
