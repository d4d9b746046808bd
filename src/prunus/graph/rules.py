"""One rule an operation: which axes of its inputs and outputs are the same, and which weights produce or read them.

An operation without a rule freezes every axis it touches and is reported by name. Rules are written for PyTorch's
own operations as `torch.export` prints them, so a user's custom operation never matches one by accident.
"""

from math import prod
from typing import Any

import torch

from prunus.graph.analysis import Analysis, Dims, Rule, references
from prunus.graph.trace import Node, Ref
from prunus.graph.unify import Var, atoms, concatenation, find, freeze, product, unify

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Any:
    """Register a rule for operations of the `aten` namespace, named without overload and in-place mark."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def apply(a: Analysis, node: Node) -> list[Dims]:
    """Apply the rule of an operation; without one, freeze what it touches."""
    if node.op == "getitem":
        return [a.dims[node.args[0].name][node.args[1]]]
    found = RULES.get(node.base) if node.op.startswith("aten.") else None
    if found is None and node.pointwise and node.op.startswith("aten."):
        found = pointwise  # PyTorch itself declares these elementwise
    if found is None:
        return unknown(a, node)
    return found(a, node)


def unknown(a: Analysis, node: Node) -> list[Dims]:
    """No rule fits: freeze everything that the operation touches; what it multiplies is a fixed cost."""
    a.freeze_arguments(node)
    a.fixed_macs += node.macs
    return a.fresh(node, a.reason(node))


@rule("_assert_tensor_metadata")
def nothing(a: Analysis, node: Node) -> list[Dims]:
    """A check of dtype that exporting leaves behind conversions: it reads no values."""
    return a.fresh(node)


@rule("clone", "contiguous", "detach", "alias", "to", "_to_copy", "lift_fresh_copy", "type_as")
@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def identity(a: Analysis, node: Node) -> list[Dims]:
    """The first argument's values, another dtype or storage; dropout does nothing in evaluation mode."""
    return [a.of(node.args[0])]


@rule("hardtanh", "relu6", "silu", "mish", "hardswish", "zeros_like", "ones_like", "full_like", "add", "sub", "mul")
@rule("div", "maximum", "minimum", "where", "relu", "selu")
def pointwise(a: Analysis, node: Node) -> list[Dims]:
    """Elementwise, with broadcasting; what happens to a dead unit's values is nobody's business but its readers'."""
    refs = references(node)
    shapes = [tuple(find(var).size for var in a.of(ref)) for ref in refs]
    if len(node.shapes) != 1 or torch.broadcast_shapes(*shapes) != node.shapes[0]:
        return unknown(a, node)
    return [a.broadcast(node, refs)]


@rule("prelu", "_prelu_kernel")
def prelu(a: Analysis, node: Node) -> list[Dims]:
    """One slope for all or one a channel (dimension 1)."""
    x, weight = a.of(node.args[0]), a.of(node.args[1])
    if weight and find(weight[-1 if len(weight) == 1 else 1]).size > 1:
        unify(x[1], weight[-1 if len(weight) == 1 else 1], a.reason(node))
    return [x]


@rule("linear")
def linear(a: Analysis, node: Node) -> list[Dims]:
    """y = x W^T + b: W's first dimension makes units, its second reads them."""
    x, weight = a.of(node.args[0]), a.of(node.args[1])
    if len(weight) != 2:
        return unknown(a, node)
    unify(x[-1], weight[1], a.reason(node))
    a.contract(node, node.args[1], 1, weight[1])
    a.produce(node.args[1], 0, "neuron")
    bias = argument(node, 2, "bias")
    if bias is not None:
        unify(weight[0], a.of(bias)[0], a.reason(node))
    a.work(node, node.args[1], x[:-1])
    return [[*x[:-1], weight[0]]]


@rule("conv1d", "conv2d", "conv3d")
def conv(a: Analysis, node: Node) -> list[Dims]:
    """Input channels are (groups x channels read), output channels (groups x channels made); depthwise reads one."""
    x, weight = a.of(node.args[0]), a.of(node.args[1])
    groups = argument(node, 6, "groups", 1)
    rank = len(weight) - 2
    if len(x) != rank + 2:  # an unbatched input
        return unknown(a, node)
    outer, made = Var(groups), Var(find(weight[0]).size // groups)
    unify(weight[0], product([outer, made]), a.reason(node))
    unify(x[1], product([outer, weight[1]]), a.reason(node))
    if find(weight[1]).size > 1 or groups == 1:
        a.contract(node, node.args[1], 1, weight[1])
    a.split_by(node.args[1], outer)
    a.produce(node.args[1], 0, "map")
    a.freeze_pixels(node, x[2:], weight[2:])
    if argument(node, 2, "bias") is not None:
        unify(weight[0], a.of(argument(node, 2, "bias"))[0], a.reason(node))
    spatial = [a.frozen(size, node) for size in (node.shapes[0] or ())[2:]]
    a.work(node, node.args[1], [x[0], *spatial])
    return [[x[0], weight[0], *spatial]]


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(a: Analysis, node: Node) -> list[Dims]:
    """The weight is (groups x channels read, channels made a group, kernel)."""
    x, weight = a.of(node.args[0]), a.of(node.args[1])
    groups = argument(node, 6, "groups", 1)
    if len(x) != len(weight):
        return unknown(a, node)
    outer, read = Var(groups), Var(find(weight[0]).size // groups)
    unify(weight[0], product([outer, read]), a.reason(node))
    unify(x[1], weight[0], a.reason(node))
    channels = product([outer, weight[1]])
    if read.size > 1 or groups == 1:
        a.contract(node, node.args[1], 0, read, around=weight[0])
    a.split_by(node.args[1], outer)
    a.produce(node.args[1], 1, "map")
    a.freeze_pixels(node, x[2:], weight[2:])
    if argument(node, 2, "bias") is not None:
        unify(channels, a.of(argument(node, 2, "bias"))[0], a.reason(node))
    spatial = [a.frozen(size, node) for size in (node.shapes[0] or ())[2:]]
    a.work(node, node.args[1], [x[0], *x[2:]])
    return [[x[0], channels, *spatial]]


@rule("batch_norm")
def batch_norm(a: Analysis, node: Node) -> list[Dims]:
    """Every channel by itself: weight, bias and running statistics belong to it."""
    x = a.of(node.args[0])
    for ref in node.args[1:5]:
        if isinstance(ref, Ref):
            unify(x[1], a.of(ref)[0], a.reason(node))
    return [x]


@rule("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d")
@rule("adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool2d_with_indices")
def pool(a: Analysis, node: Node) -> list[Dims]:
    """Every map by itself; the pixels are regrouped and frozen."""
    x = a.of(node.args[0])
    spatial = next(d for d in (1, 2, 3) if f"{d}d" in node.base)
    a.freeze_pixels(node, x[-spatial:])
    head = x[:-spatial]
    return [[*head, *(a.frozen(size, node) for size in (shape or ())[len(head) :])] for shape in node.shapes]


@rule("flatten", "view", "reshape", "_unsafe_view", "unflatten")
def regroup(a: Analysis, node: Node) -> list[Dims]:
    """Row-major regrouping: 50 maps of 4 x 4 pixels become 50 x 16 features."""
    x, shape = a.of(node.args[0]), node.shapes[0] or ()
    if prod(find(var).size for var in x) != prod(shape):  # a view as another dtype
        return unknown(a, node)
    return [a.reshape(node, x, shape)]


@rule("squeeze", "unsqueeze")
def drop_or_add_one(a: Analysis, node: Node) -> list[Dims]:
    """Dimensions of one position come and go."""
    rest = [var for var in a.of(node.args[0]) if find(var).size != 1]
    return [[rest.pop(0) if size != 1 else Var(1) for size in node.shapes[0] or ()]]


@rule("permute", "transpose", "t", "swapaxes")
def permute(a: Analysis, node: Node) -> list[Dims]:
    """The same axes in another order."""
    x = a.of(node.args[0])
    if node.base == "permute":
        order = list(node.args[1])
    else:
        order = list(range(len(x)))
        if len(x) > 1:
            i, j = (0, 1) if node.base == "t" else node.args[1:3]
            order[i], order[j] = order[j], order[i]
    return [[x[k] for k in order]]


@rule("cat", "concat", "concatenate")
def cat(a: Analysis, node: Node) -> list[Dims]:
    """Segments one behind the other along one dimension; the others are the same."""
    parts = [a.of(ref) for ref in node.args[0]]
    if len({len(part) for part in parts}) != 1:  # PyTorch lets an empty tensor join any others
        return unknown(a, node)
    dim = argument(node, 1, "dim", 0) % len(parts[0])
    result = list(parts[0])
    for part in parts[1:]:
        for k, var in enumerate(part):
            if k != dim:
                unify(result[k], var, a.reason(node))
    result[dim] = concatenation([part[dim] for part in parts])
    return [result]


@rule("softmax", "log_softmax", "_softmax", "_log_softmax")
def softmax(a: Analysis, node: Node) -> list[Dims]:
    """Positions along `dim` share one sum: that axis is frozen, the others pass."""
    x = a.of(node.args[0])
    freeze(x[argument(node, 1, "dim", -1)], a.reason(node))
    return [x]


@rule("mean", "sum", "amax", "amin", "var", "std", "max", "min")
def reduce(a: Analysis, node: Node) -> list[Dims]:
    """What is reduced must stay whole and is frozen; the other axes pass."""
    x = a.of(node.args[0])
    over = argument(node, 1, "dim")
    if node.base in ("max", "min") and (over is None or isinstance(over, Ref)):
        if isinstance(over, Ref):
            return pointwise(a, node)
        over = None
    if over is None or over == () or isinstance(over, bool):  # var(x, unbiased) takes no dimension
        dims = list(range(len(x)))
    else:
        dims = [over] if isinstance(over, int) else list(over)
    gone = {k % len(x) for k in dims} if x else set()
    for k in gone:
        freeze(x[k], a.reason(node, silent=_spatial(x[k])))
    keepdim = len(node.shapes[0] or ()) == len(x)
    kept = [Var(1) if k in gone else var for k, var in enumerate(x) if keepdim or k not in gone]
    return [list(kept) for _ in node.shapes]


def _spatial(var: Var) -> bool:
    """Pixels are frozen already and need no second report."""
    return all(atom.reasons and all(r.silent for r in atom.reasons) for atom in atoms(var))
