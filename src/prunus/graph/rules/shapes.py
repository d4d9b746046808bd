"""Operations that regroup, cut, join and repeat: the same numbers at other places."""

from math import prod

from prunus.graph.analysis import Analysis, Dims
from prunus.graph.rules.registry import argument, rule, unknown
from prunus.graph.trace import Node, Ref
from prunus.graph.unify import Var, concatenation, find, freeze, known, product, split_cat, split_product, unify


@rule("flatten", "view", "reshape", "_unsafe_view", "unflatten", "view_as", "reshape_as", "ravel")
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


@rule("permute", "transpose", "t", "swapaxes", "movedim", "numpy_T", "mT", "adjoint", "matrix_H")
def permute(a: Analysis, node: Node) -> list[Dims]:
    """The same axes in another order; a weight seen through it is that weight still."""
    x = a.of(node.args[0])
    order = list(range(len(x)))
    if node.base == "permute":
        order = [k % len(x) for k in node.args[1]]
    elif node.base == "numpy_T":
        order.reverse()
    elif node.base in ("mT", "adjoint", "matrix_H"):
        order[-1], order[-2] = order[-2], order[-1]
    elif node.base == "movedim":
        source, target = node.args[1:3]
        if not isinstance(source, int):
            return unknown(a, node)
        order.insert(target % len(x), order.pop(source % len(x)))
    elif len(x) > 1:
        i, j = (0, 1) if node.base == "t" else node.args[1:3]
        order[i], order[j] = order[j], order[i]
    view = a.view_of(node.args[0])
    if view is not None:
        a.views[node.name] = (view[0], tuple(view[1][k] for k in order))
        if node.args[0].name in a.parts:
            a.parts[node.name] = a.parts[node.args[0].name]
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


@rule("stack")
def stack(a: Analysis, node: Node) -> list[Dims]:
    """Tensors of one shape along a new dimension."""
    parts = [a.of(ref) for ref in node.args[0]]
    result = list(parts[0])
    for part in parts[1:]:
        for one, other in zip(result, part, strict=True):
            unify(one, other, a.reason(node))
    dim = argument(node, 1, "dim", 0) % (len(result) + 1)
    result.insert(dim, a.frozen(len(parts), node))
    return [result]


@rule("split", "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "unsafe_split", "unsafe_chunk")
def split(a: Analysis, node: Node) -> list[Dims]:
    """Segments of one dimension, in order."""
    x = a.of(node.args[0])
    dim = argument(node, 2, "dim", 0)
    if node.base in ("hsplit", "vsplit"):
        return unknown(a, node)
    dim %= len(x)
    a.part_of_weight(node, node.args[0], dim)
    rest, results = x[dim], []
    sizes = [(shape or ())[dim] for shape in node.shapes]
    for number, size in enumerate(sizes):
        parts = (rest, Var(0)) if number == len(sizes) - 1 else split_cat(rest, size)
        if parts is None or find(parts[0]).size != size:
            freeze(x[dim], a.reason(node))
            return [[*x[:dim], a.frozen(s, node), *x[dim + 1 :]] for s in sizes]
        results.append([*x[:dim], parts[0], *x[dim + 1 :]])
        rest = parts[1]
    return results


@rule("slice", "narrow")
def cut(a: Analysis, node: Node) -> list[Dims]:
    """A segment of one dimension; every second position and the like keep the axis whole."""
    x, shape = a.of(node.args[0]), node.shapes[0] or ()
    dim = argument(node, 1, "dim", 0) % len(x)
    size, taken = find(x[dim]).size, shape[dim]
    if taken == size:
        return [x]
    start = argument(node, 2, "start", 0) or 0
    step = argument(node, 4, "step", 1) if node.base == "slice" else 1
    axis = x[dim]
    if isinstance(start, int) and step == 1:
        start = max(0, start + size if start < 0 else start)
        if known(axis) or taken == 0:
            return [[*x[:dim], a.frozen(taken, node), *x[dim + 1 :]]]
        head = (None, axis) if start == 0 else split_cat(axis, start)
        middle = None if head is None else (head[1], None) if start + taken == size else split_cat(head[1], taken)
        if middle is not None:
            a.part_of_weight(node, node.args[0], dim)
            return [[*x[:dim], middle[0], *x[dim + 1 :]]]
    freeze(axis, a.reason(node))
    return [[*x[:dim], a.frozen(taken, node), *x[dim + 1 :]]]


@rule("select")
def select(a: Analysis, node: Node) -> list[Dims]:
    """One position of a dimension, which must stay where it is."""
    x = a.of(node.args[0])
    dim = argument(node, 1, "dim", 0) % len(x)
    freeze_quietly(a, node, x[dim])
    return [[var for k, var in enumerate(x) if k != dim]]


@rule("unbind")
def unbind(a: Analysis, node: Node) -> list[Dims]:
    """Every position of a dimension by itself."""
    x = a.of(node.args[0])
    dim = argument(node, 1, "dim", 0) % len(x)
    freeze_quietly(a, node, x[dim])
    return [[var for k, var in enumerate(x) if k != dim] for _ in node.shapes]


def freeze_quietly(a: Analysis, node: Node, var: Var) -> None:
    """Freeze an axis that is picked from; news only where units are made along it."""
    freeze(var, a.reason(node, silent=known(var) or find(var).size <= 4))


@rule("expand", "expand_as", "broadcast_to")
def expand(a: Analysis, node: Node) -> list[Dims]:
    """Dimensions of one position become longer: as long as is wanted."""
    x, shape = a.of(node.args[0]), node.shapes[0] or ()
    padded = [*(Var(1) for _ in range(len(shape) - len(x))), *x]
    return [[var if find(var).size == size else Var(size) for var, size in zip(padded, shape, strict=True)]]


@rule("repeat", "tile")
def repeat(a: Analysis, node: Node) -> list[Dims]:
    """The whole axis several times over: (times x positions)."""
    x, shape = a.of(node.args[0]), node.shapes[0] or ()
    padded = [*(Var(1) for _ in range(len(shape) - len(x))), *x]
    result = []
    for var, size in zip(padded, shape, strict=True):
        times = size // find(var).size
        result.append(var if times == 1 else product([a.frozen(times, node), var]))
    return [result]


@rule("repeat_interleave")
def repeat_interleave(a: Analysis, node: Node) -> list[Dims]:
    """Every position several times: (positions x times)."""
    x, shape = a.of(node.args[0]), node.shapes[0] or ()
    dim = argument(node, 2, "dim")
    if isinstance(node.args[1] if len(node.args) > 1 else None, Ref) or not isinstance(dim, int):
        return unknown(a, node)
    dim %= len(x)
    times = shape[dim] // find(x[dim]).size
    return [[*x[:dim], product([x[dim], a.frozen(times, node)]), *x[dim + 1 :]]]


@rule("constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d")
@rule("replication_pad2d", "replication_pad3d")
def pad(a: Analysis, node: Node) -> list[Dims]:
    """Pixels are padded; a constant beside maps are maps of their own, as many as the result wants."""
    x, shape = a.of(node.args[0]), node.shapes[0] or ()
    amounts = node.args[1]
    mode = argument(node, 2, "mode", "constant") if node.base == "pad" else node.base
    result = list(x)
    for k in range(len(amounts) // 2):
        dim = len(x) - 1 - k
        before, after = amounts[2 * k : 2 * k + 2]
        if not before and not after:
            continue
        free = not known(x[dim])
        if free and mode in ("constant", "constant_pad_nd") and before >= 0 and after >= 0:
            result[dim] = concatenation([part for part in (Var(before), x[dim], Var(after)) if find(part).size])
        else:
            freeze(x[dim], a.reason(node, silent=not free))
            result[dim] = a.frozen(shape[dim], node)
    return [result]


@rule("pixel_shuffle")
def pixel_shuffle(a: Analysis, node: Node) -> list[Dims]:
    """(channels x r x r) maps become channels of r times larger pixels."""
    x, factor = a.of(node.args[0]), node.args[1]
    channels = Var(find(x[-3]).size // factor**2)
    unify(x[-3], product([channels, a.frozen(factor**2, node)]), a.reason(node))
    a.freeze_pixels(node, x[-2:])
    return [[*x[:-3], channels, *(a.frozen(size, node) for size in (node.shapes[0] or ())[-2:])]]


@rule("pixel_unshuffle")
def pixel_unshuffle(a: Analysis, node: Node) -> list[Dims]:
    """Pixels become maps: channels x r x r."""
    x, factor = a.of(node.args[0]), node.args[1]
    a.freeze_pixels(node, x[-2:])
    channels = product([x[-3], a.frozen(factor**2, node)])
    return [[*x[:-3], channels, *(a.frozen(size, node) for size in (node.shapes[0] or ())[-2:])]]


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(a: Analysis, node: Node) -> list[Dims]:
    """(groups x channels) become (channels x groups)."""
    x, groups = a.of(node.args[0]), node.args[1]
    parts = split_product(x[1], groups)
    if parts is None:
        return unknown(a, node)
    a.split_by_module(node, parts[0])
    return [[x[0], product([parts[1], parts[0]]), *x[2:]]]


@rule("index_select")
def index_select(a: Analysis, node: Node) -> list[Dims]:
    """Some positions of a dimension, which must stay where they are."""
    x, dim = a.of(node.args[0]), node.args[1]
    dim %= len(x)
    freeze_quietly(a, node, x[dim])
    return [[*x[:dim], a.frozen((node.shapes[0] or ())[dim], node), *x[dim + 1 :]]]


@rule("index")
def index(a: Analysis, node: Node) -> list[Dims]:
    """Positions picked by tensors: dimensions that are picked from are frozen, the others pass where they stood."""
    x, picks = a.of(node.args[0]), list(node.args[1])
    picks += [None] * (len(x) - len(picks))
    chosen = [k for k, pick in enumerate(picks) if pick is not None]
    if not chosen or chosen != list(range(chosen[0], chosen[-1] + 1)):
        return unknown(a, node)
    for k in chosen:
        freeze_quietly(a, node, x[k])
    shape = node.shapes[0] or ()
    before, after = x[: chosen[0]], x[chosen[-1] + 1 :]
    new = shape[len(before) : len(shape) - len(after)]
    for pick in picks:
        if isinstance(pick, Ref):
            for var in a.of(pick):
                freeze_quietly(a, node, var)
    return [[*before, *(a.frozen(size, node) for size in new), *after]]


@rule("gather")
def gather(a: Analysis, node: Node) -> list[Dims]:
    """Positions picked one by one along a dimension; the result is the index's shape."""
    x, picked = a.of(node.args[0]), a.of(node.args[2])
    dim = node.args[1] % len(x)
    for k, (var, other) in enumerate(zip(x, picked, strict=True)):
        if k == dim or find(var).size != find(other).size:
            freeze(var, a.reason(node))
            freeze(other, a.reason(node))
        else:
            unify(var, other, a.reason(node))
    return [list(picked)]


@rule("glu")
def glu(a: Analysis, node: Node) -> list[Dims]:
    """One half of a dimension, gated by the other."""
    x = a.of(node.args[0])
    dim = argument(node, 1, "dim", -1) % len(x)
    parts = split_cat(x[dim], find(x[dim]).size // 2)
    if parts is None:
        return unknown(a, node)
    unify(parts[0], parts[1], a.reason(node))
    return [[*x[:dim], parts[0], *x[dim + 1 :]]]


@rule("arange", "linspace", "eye", "rand", "randn", "randint", "rand_like", "randn_like", "one_hot")
def positions(a: Analysis, node: Node) -> list[Dims]:
    """Numbers that depend on their place, or are drawn: as many as there are."""
    for ref in [arg for arg in node.args if isinstance(arg, Ref)]:
        for var in a.of(ref):
            freeze(var, a.reason(node))
    return a.fresh(node, a.reason(node, silent=True))
