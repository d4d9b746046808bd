"""Layers with weights of their own: which dimension of a weight makes units, and which reads them."""

from prunus.graph.analysis import Analysis, Dims
from prunus.graph.rules.registry import argument, rule, unknown
from prunus.graph.trace import Node, Ref
from prunus.graph.unify import Var, add_up, find, freeze, product, unify


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


@rule("group_norm")
def group_norm(a: Analysis, node: Node) -> list[Dims]:
    """Channels are (groups x channels a group); a group shares its statistics, so that only whole groups can go."""
    x = a.of(node.args[0])
    groups = node.args[1]
    outer, inner = Var(groups), Var(find(x[1]).size // groups)
    unify(x[1], product([outer, inner]), a.reason(node))
    freeze(inner, a.reason(node))
    a.split_by_module(node, outer)
    for ref in (argument(node, 2, "weight"), argument(node, 3, "bias")):
        if isinstance(ref, Ref):
            unify(x[1], a.of(ref)[0], a.reason(node))
    return [x]


@rule("instance_norm")
def instance_norm(a: Analysis, node: Node) -> list[Dims]:
    """Every channel of every example by itself; pixels share its statistics."""
    x = a.of(node.args[0])
    for ref in node.args[1:5]:
        if isinstance(ref, Ref):
            unify(x[1], a.of(ref)[0], a.reason(node))
    a.freeze_pixels(node, x[2:])
    return [x]


@rule("layer_norm", "native_layer_norm")
def layer_norm(a: Analysis, node: Node) -> list[Dims]:
    """All units share mean and variance: they can only stay together."""
    x = a.of(node.args[0])
    shared = len(node.args[1])
    for place, name in ((2, "weight"), (3, "bias")):
        ref = argument(node, place, name)
        if isinstance(ref, Ref):
            for var, own in zip(x[-shared:], a.of(ref), strict=True):
                unify(var, own, a.reason(node))
    for var in x[-shared:]:
        freeze(var, a.reason(node))
    return [list(x), *(a.fresh(node, a.reason(node, silent=True))[1:])]


@rule("rms_norm")
def rms_norm(a: Analysis, node: Node) -> list[Dims]:
    """All units share their mean square: a sum over them, which dead units at zero leave as it is."""
    x = a.of(node.args[0])
    shared = len(node.args[1])
    weight = argument(node, 2, "weight")
    for k, var in enumerate(x[-shared:]):
        if isinstance(weight, Ref):
            unify(var, a.of(weight)[k], a.reason(node))
        add_up(var, a.reason(node))
    return [x]


@rule("embedding")
def embedding(a: Analysis, node: Node) -> list[Dims]:
    """A table's rows by index: rows are frozen, columns are features."""
    table, index = a.of(node.args[0]), a.of(node.args[1])
    freeze(table[0], a.reason(node))
    a.produce(node.args[0], 1, "feature")
    return [[*index, table[1]]]


@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d")
@rule("upsample_bilinear2d", "upsample_linear1d", "upsample_bicubic2d", "upsample_trilinear3d", "grid_sampler_2d")
@rule("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler")
def resample(a: Analysis, node: Node) -> list[Dims]:
    """Every map by itself, at other pixels."""
    x = a.of(node.args[0])
    a.freeze_pixels(node, x[2:])
    for ref in node.args[1:2]:
        if isinstance(ref, Ref):  # a grid of places
            for var in a.of(ref):
                freeze(var, a.reason(node, silent=True))
    return [[x[0], x[1], *(a.frozen(size, node) for size in (node.shapes[0] or ())[2:])]]
