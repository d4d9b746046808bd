"""Products: of what was computed with a weight, which reads it, or with something else that was computed.

What two computed tensors are contracted along has no weight to carry a gate; a dead unit must then be zero in what is
multiplied, which its producers' gates make it (`add_up`).
"""

from typing import Any

from prunus.graph.analysis import Analysis, Dims, references
from prunus.graph.rules.registry import argument, rule, unknown
from prunus.graph.trace import Node
from prunus.graph.unify import Var, add_up, call, find, freeze, known, product, unify
from prunus.measure import spelled_out


@rule("matmul", "mm", "bmm", "mv", "dot")
def matmul(a: Analysis, node: Node) -> list[Dims]:
    """The last dimension of the one meets the last but one of the other; dimensions before them broadcast."""
    return _matmul(a, node, node.args[0], node.args[1])


@rule("addmm", "baddbmm", "addbmm")
def addmm(a: Analysis, node: Node) -> list[Dims]:
    """bias + x W, as transformers' Conv1D has it."""
    if node.base == "addbmm":
        return unknown(a, node)
    results = _matmul(a, node, node.args[1], node.args[2])
    for var, bias in zip(reversed(results[0]), reversed(a.of(node.args[0])), strict=False):
        if find(bias).size > 1:
            unify(var, bias, a.reason(node))
    return results


def _matmul(a: Analysis, node: Node, left: Any, right: Any) -> list[Dims]:
    x, y = a.of(left), a.of(right)
    along, other = x[-1], y[-2] if len(y) > 1 else y[0]
    unify(along, other, a.reason(node))
    weights = [a.view_of(ref) for ref in (left, right)]
    if weights[1] is not None:  # x W: the weight reads along its last but one dimension and makes along its last
        a.contract(node, right, len(y) - 2 if len(y) > 1 else 0, other)
        if len(y) > 1:
            a.produce(right, len(y) - 1, "neuron")
    elif weights[0] is not None:  # W x
        a.contract(node, left, len(x) - 1, along)
        if len(x) > 1:
            a.produce(left, len(x) - 2, "neuron")
    else:
        add_up(along, a.reason(node))
        call(along, "head dim")
    shape = node.shapes[0] or ()
    head: Dims = [Var(1) for _ in shape[: len(shape) - (len(x) > 1) - (len(y) > 1)]]
    for dims in (x[:-2], y[:-2]):
        for back, var in enumerate(reversed(dims), 1):
            if find(var).size == 1:
                continue
            if find(head[-back]).size == 1:
                head[-back] = var
            else:
                unify(head[-back], var, a.reason(node))
    if weights == [None, None]:
        for var in head:
            call(var, "head")
        if not all(known(var) for var in head):  # not the batch alone: there are heads
            call(y[-1], "head dim")
    rows = [x[-2]] if len(x) > 1 else []
    columns = [y[-1]] if len(y) > 1 else []
    if weights[1] is not None and len(y) == 2:
        a.work(node, right, [*x[:-1]])
    elif weights[0] is not None and len(x) == 2:
        a.work(node, left, [*y[:-2], *columns])
    else:
        a.work(node, None, [*head, *rows, along, *columns])
    return [[*head, *rows, *columns]]


@rule("scaled_dot_product_attention")
def attention(a: Analysis, node: Node) -> list[Dims]:
    """softmax(q k^T / sqrt(E)) v, head by head; with grouped queries several heads of q share one of k and v."""
    q, k, v = (a.of(ref) for ref in node.args[:3])
    if not len(q) == len(k) == len(v) >= 3:
        return unknown(a, node)
    reason = a.reason(node)
    unify(q[-1], k[-1], reason)
    unify(k[-2], v[-2], reason)
    for one, two, three in zip(q[:-2], k[:-2], v[:-2], strict=True):
        if find(two).size == find(three).size:
            unify(two, three, reason)
        if find(one).size == find(two).size:
            unify(one, two, reason)
        elif find(two).size > 1:  # enable_gqa: query head h reads key-value head h // repeats
            repeats = find(one).size // find(two).size
            unify(one, product([two, Var(repeats)]), reason)
    add_up(q[-1], reason)
    call(q[-1], "head dim")
    call(v[-1], "head dim")
    if len(q) > 3:
        for dims in (q, k, v):
            call(dims[-3], "head")
    mask = argument(node, 3, "attn_mask")
    if mask is not None:
        square = [*q[:-1], k[-2]]
        for var, part in zip(reversed(square), reversed(a.of(mask)), strict=False):
            if find(part).size > 1:
                unify(var, part, reason)
    a.work(node, None, [*q[:-2], q[-2], k[-2], q[-1]])
    a.work(node, None, [*q[:-2], q[-2], k[-2], v[-1]])
    return [[*q[:-1], v[-1]]]


@rule("einsum")
def einsum(a: Analysis, node: Node) -> list[Dims]:
    """Labels say which axes are the same; what no label of the result names is summed over."""
    operands = list(node.args[1])
    equation = spelled_out(node.args[0], [len(a.of(ref)) for ref in operands])
    if equation is None or len(operands) > 2 or (len(node.args) > 2 and node.args[2] is not None):
        return unknown(a, node)
    left, arrow, right = equation.partition("->")
    labels = left.split(",")
    if not arrow:
        every = "".join(labels)
        right = "".join(sorted(label for label in set(every) if every.count(label) == 1))
    if len(labels) != len(operands) or any(len(set(one)) < len(one) for one in labels):
        return unknown(a, node)
    where: dict[str, Var] = {}
    for one, ref in zip(labels, operands, strict=True):
        for label, var in zip(one, a.of(ref), strict=True):
            if label in where and find(where[label]).size != find(var).size:
                return unknown(a, node)  # broadcasting along a label
            unify(where.setdefault(label, var), var, a.reason(node))
    views = [a.view_of(ref) for ref in operands]
    weight = next((k for k, view in enumerate(views) if view is not None), None) if len(operands) == 2 else None
    shared = [label for label in right if all(label in one for one in labels)]
    for label, var in where.items():
        if label in right:
            if weight is not None and label in labels[weight] and label not in labels[1 - weight]:
                a.produce(operands[weight], labels[weight].index(label), "neuron")
            elif len(operands) == 2 and views == [None, None] and all(label in one for one in labels):
                call(var, "head")
            elif len(operands) == 2 and views == [None, None] and not all(known(where[one]) for one in shared):
                call(var, "head dim")
        elif weight is not None and all(label in one for one in labels):
            a.contract(node, operands[weight], labels[weight].index(label), var)
        else:
            add_up(var, a.reason(node))
            call(var, "head dim")
    if len(operands) == 2:
        if weight is not None:
            a.work(node, operands[weight], [var for label, var in where.items() if label not in labels[weight]])
        else:
            a.work(node, None, list(where.values()))
    return [[where[label] for label in right]]


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(a: Analysis, node: Node) -> list[Dims]:
    """The input's features are read by the first layer's weights; hidden units stay: gates reread them every step."""
    if not isinstance(node.args[2], tuple):  # a packed sequence
        return unknown(a, node)
    x, flat = a.of(node.args[0]), list(node.args[2])
    layers, both, first = node.args[4], node.args[7], node.args[8]
    directions = 2 if both else 1
    each = len(flat) // (layers * directions)
    reason = a.reason(node)
    steps = [x[0], x[1]] if len(x) == 3 else [x[0]]
    for number in range(layers * directions):
        weights = flat[number * each : (number + 1) * each]
        for ref in weights:
            for dim, var in enumerate(a.of(ref)):
                if not (number < directions and dim == 1 and ref is weights[0]):
                    freeze(var, a.reason(node))
        if number < directions:
            unify(x[-1], a.of(weights[0])[1], reason)
            a.contract(node, weights[0], 1, a.of(weights[0])[1])
        a.work(node, weights[0], steps)
        a.work(node, weights[1], steps)
        if each > 4 or (each == 3):  # a projection of the hidden state
            a.work(node, weights[-1], steps)
    for ref in references(node):
        if all(ref != weight for weight in flat) and ref != node.args[0]:
            for var in a.of(ref):
                freeze(var, a.reason(node))
    results = a.fresh(node, a.reason(node, silent=True))
    if len(x) == 3 and results[0]:
        batch = 0 if first else 1
        results[0][batch], results[0][1 - batch] = x[batch], x[1 - batch]
    return results
