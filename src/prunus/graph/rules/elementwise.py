"""Operations that treat every number or every position by itself, or add up over some of them."""

from math import prod

import torch

from prunus.graph.analysis import Analysis, Dims, references
from prunus.graph.rules.registry import argument, rule, unknown
from prunus.graph.trace import Node, Ref
from prunus.graph.unify import Var, add_up, atoms, find, freeze, unify

INPUT = "network input"


@rule("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")
def nothing(a: Analysis, node: Node) -> list[Dims]:
    """A check that exporting leaves behind: it reads no values of units."""
    return a.fresh(node)


@rule("clone", "contiguous", "detach", "alias", "to", "_to_copy", "lift_fresh_copy", "type_as")
@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def identity(a: Analysis, node: Node) -> list[Dims]:
    """The first argument's values, another dtype or storage; dropout does nothing in evaluation mode."""
    return [a.of(node.args[0])]


@rule("hardtanh", "relu6", "silu", "mish", "hardswish", "zeros_like", "ones_like", "full_like", "add", "sub", "mul")
@rule("leaky_relu", "elu", "celu", "gelu", "hardsigmoid", "hardshrink", "softshrink", "softplus", "threshold", "rrelu")
@rule("sigmoid", "tanh", "log_sigmoid")
@rule("div", "maximum", "minimum", "where", "relu", "selu", "masked_fill", "copy", "empty_like", "clamp", "rsub")
def pointwise(a: Analysis, node: Node) -> list[Dims]:
    """Elementwise, with broadcasting; what happens to a dead unit's values is nobody's business but its readers'."""
    refs = references(node)
    shapes = [tuple(find(var).size for var in a.of(ref)) for ref in refs]
    if len(node.shapes) != 1 or not refs or torch.broadcast_shapes(*shapes) != node.shapes[0]:
        return unknown(a, node)
    return [a.broadcast(node, refs)]


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
def constant(a: Analysis, node: Node) -> list[Dims]:
    """The same number everywhere: as many as are wanted."""
    return a.fresh(node)


@rule("prelu", "_prelu_kernel")
def prelu(a: Analysis, node: Node) -> list[Dims]:
    """One slope for all or one a channel (dimension 1)."""
    x, weight = a.of(node.args[0]), a.of(node.args[1])
    if weight and find(weight[-1 if len(weight) == 1 else 1]).size > 1:
        unify(x[1], weight[-1 if len(weight) == 1 else 1], a.reason(node))
    return [x]


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def along(a: Analysis, node: Node) -> list[Dims]:
    """Positions along `dim` see each other: that axis is frozen, the others pass."""
    x = a.of(node.args[0])
    if x:
        axis = x[argument(node, 1, "dim", -1)]
        freeze(axis, a.reason(node, silent=spatial(axis)))
    return [list(x) for _ in node.shapes]


@rule("flip", "roll", "tril", "triu", "sort", "topk", "argsort")
def reorder(a: Analysis, node: Node) -> list[Dims]:
    """Positions change places along some dimensions: these are frozen where they are longer than one."""
    x = a.of(node.args[0])
    if node.base in ("tril", "triu"):
        dims = [-2, -1]
    elif node.base in ("flip", "roll"):
        dims = argument(node, 1, "dims", ()) if node.base == "flip" else argument(node, 2, "dims", ())
    else:
        place = {"sort": 1, "argsort": 1, "topk": 2}[node.base]
        dims = argument(node, place, "dim", -1)
    dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if not isinstance(dims, list | tuple) or not dims:  # over all of them, or stable=... in dim's place
        return unknown(a, node)
    moved = {k % len(x) for k in dims}
    for k in moved:
        freeze(x[k], a.reason(node, silent=spatial(x[k])))
    results = []
    for shape in node.shapes:
        results.append([var if k not in moved else a.frozen((shape or ())[k], node) for k, var in enumerate(x)])
    return results


@rule("mean", "sum", "amax", "amin", "var", "std", "max", "min", "logsumexp", "any", "all", "argmax", "argmin")
@rule("linalg_vector_norm", "norm", "prod", "var_mean", "std_mean", "count_nonzero")
def reduce(a: Analysis, node: Node) -> list[Dims]:
    """What is reduced must stay whole and is frozen; the other axes pass.

    A sum is exact where dead units are zero, and so is a mean whose divisor stays what it was.
    """
    x = a.of(node.args[0])
    place = {"linalg_vector_norm": 2, "norm": 2}.get(node.base, 1)
    over = argument(node, place, "dim")
    if node.base in ("max", "min") and (over is None or isinstance(over, Ref)):
        if isinstance(over, Ref):
            return pointwise(a, node)
        over = None
    if over is None or over == () or isinstance(over, bool):  # var(x, unbiased) takes no dimension
        dims = list(range(len(x)))
    else:
        dims = [over] if isinstance(over, int) else list(over)
    gone = {k % len(x) for k in dims} if x else set()
    adds = node.base in ("mean", "sum")
    for k in gone:
        if adds and not any(atom.reasons for atom in atoms(x[k])):
            add_up(x[k], a.reason(node))
        else:
            freeze(x[k], a.reason(node, silent=spatial(x[k])))
    keepdim = len(node.shapes[0] or ()) == len(x)
    kept = [Var(1) if k in gone else var for k, var in enumerate(x) if keepdim or k not in gone]
    if any(prod(find(v).size for v in kept) != prod(shape or ()) for shape in node.shapes):
        return unknown(a, node)
    return [list(kept) for _ in node.shapes]


def spatial(var: Var) -> bool:
    """Pixels and tokens are frozen already and need no second report."""
    parts = [atom for atom in atoms(var) if atom.size > 1]
    return all(atom.reasons and all(r.silent or r.operation == INPUT for r in atom.reasons) for atom in parts)
