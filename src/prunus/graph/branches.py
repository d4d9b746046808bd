"""Whole branches of residual networks: x + f(x) without f(x) is x.

A branch can go where what it alone computes is read by nothing but the addition, and begins at something that the
other operand was computed from too (the shortcut). Its gate multiplies the last layer of the branch, weight and bias
together, so that the branch times zero is zero. Where both operands are such (a shortcut with a convolution of its
own), the longer one is the branch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prunus.graph.analysis import Analysis, references
from prunus.graph.trace import Node, Ref
from prunus.graph.unify import find

ADDITIONS = ("add",)
PASSING = (  # what a factor passes through unchanged, to the operation before
    "dropout", "clone", "contiguous", "to", "view", "reshape", "permute", "transpose", "flatten", "unflatten",
    "squeeze", "unsqueeze", "relu", "leaky_relu", "slice", "getitem", "detach", "alias", "type_as",
    "feature_dropout", "roll", "constant_pad_nd", "pad", "avg_pool2d", "max_pool2d", "upsample_nearest2d",
    "upsample_bilinear2d",
)  # fmt: skip
AFFINE = {  # operations that a factor on weight and bias multiplies, and where they hold these
    "linear": (1, 2), "conv1d": (1, 2), "conv2d": (1, 2), "conv3d": (1, 2), "conv_transpose1d": (1, 2),
    "conv_transpose2d": (1, 2), "conv_transpose3d": (1, 2), "batch_norm": (1, 2), "layer_norm": (2, 3),
    "group_norm": (2, 3), "rms_norm": (2,), "addmm": (2, 0), "matmul": (1,),
}  # fmt: skip


@dataclass(frozen=True)
class Branch:
    """A branch that can go: the addition, what stays in its place, what goes, and where its gate acts.

    `nodes` are the names of the operations that go, in order; `tensors` the parameters and buffers that only they use.
    """

    name: str
    addition: str
    stays: Ref
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    sites: tuple[str, ...]


def branches(state: Analysis) -> list[Branch]:
    """Find every branch of a residual network that can go."""
    traced = state.traced
    nodes = {node.name: node for node in traced.nodes}
    order = {node.name: k for k, node in enumerate(traced.nodes)}
    users: dict[str, set[str]] = {}
    tensor_users: dict[str, set[str]] = {}
    above: dict[str, frozenset[str]] = {name: frozenset() for name in [*traced.inputs, *traced.constants]}
    for node in traced.nodes:
        found: set[str] = set()
        if all(shape is None for shape in node.shapes):  # a size or a check: it is no use of the values
            above[node.name] = frozenset()
            continue
        for ref in references(node):
            users.setdefault(ref.name, set()).add(node.name)
            owner = traced.parameters.get(ref.name)
            if owner is not None:
                tensor_users.setdefault(owner, set()).add(node.name)
            else:
                found |= above.get(ref.name, frozenset()) | {ref.name}
        above[node.name] = frozenset(found)
    result: list[Branch] = []
    taken: dict[str, int] = {}
    for node in traced.nodes:
        refs = references(node)
        if node.base not in ADDITIONS or not node.op.startswith("aten.") or len(refs) != 2 or refs[0] == refs[1]:
            continue
        if node.kwargs.get("alpha", 1) != 1 or any(ref.name in traced.parameters for ref in refs):
            continue
        both = sorted(
            ((_alone(f.name, s.name, above, users, nodes), f, s) for f, s in (refs, refs[::-1])),
            key=lambda one: -len(one[0]),
        )
        for body, f, s in both:
            found_sites = _branch(state, node, body, f, s, users, tensor_users, above, nodes)
            if found_sites is None:
                continue
            base = found_sites[0].rpartition(".")[0] or found_sites[0]
            taken[base] = taken.get(base, 0) + 1
            own = {t for t in traced.tensors if tensor_users.get(t) and tensor_users[t] <= body}
            owners = {t.rpartition(".")[0] for t in own}
            own |= {t for t in traced.tensors if not tensor_users.get(t) and t.rpartition(".")[0] in owners}
            name = f"{base}.branch" if taken[base] == 1 else f"{base}.branch#{taken[base]}"
            listed = tuple(t for t in traced.tensors if t in own)
            result.append(Branch(name, node.name, s, tuple(sorted(body, key=order.__getitem__)), listed, found_sites))
            break
    return result


def _alone(
    one: str,
    other: str,
    above: Mapping[str, frozenset[str]],
    users: Mapping[str, set[str]],
    nodes: Mapping[str, Node],
) -> frozenset[str]:
    """The operations that one operand needs and the other does not, from where they part.

    What is computed beside, from nothing that both share (a mask, a table of positions), belongs to it if nobody else
    uses it.
    """
    if one not in nodes:
        return frozenset()
    shared = (above.get(other, frozenset()) | {other}) & nodes.keys()
    beside = ((above[one] | {one}) - shared) & nodes.keys()
    body = {name for name in beside if above[name] & shared}
    beside -= body
    while more := {name for name in beside if users.get(name, set()) <= body}:
        body |= more
        beside -= more
    return frozenset(body)


def _branch(
    state: Analysis,
    node: Node,
    body: frozenset[str],
    f: Ref,
    s: Ref,
    users: Mapping[str, set[str]],
    tensor_users: Mapping[str, set[str]],
    above: Mapping[str, frozenset[str]],
    nodes: Mapping[str, Node],
) -> tuple[str, ...] | None:
    """Where the gate of a branch acts, if it is one."""
    traced = state.traced
    if not body or any(not users.get(name, set()) <= body | {node.name} for name in body):
        return None
    if users.get(f.name, set()) != {node.name} or body & set(traced.outputs):
        return None
    begins = {ref.name for name in body for ref in references(nodes[name])} - body - traced.parameters.keys()
    begins -= traced.constants.keys()
    if not begins & (above.get(s.name, frozenset()) | {s.name}) - traced.inputs.keys():
        return None  # it begins at the network's inputs, or at nothing: an embedding, a bias, a mask
    shapes = [tuple(find(var).size for var in state.of(ref)) for ref in (f, s)]
    if shapes[0] != shapes[1]:
        return None
    return _sites(state, f, body, tensor_users, users, nodes)


def _sites(
    state: Analysis,
    ref: Ref,
    body: frozenset[str],
    tensor_users: Mapping[str, set[str]],
    users: Mapping[str, set[str]],
    nodes: Mapping[str, Node],
) -> tuple[str, ...] | None:
    """Walk back to the last layer whose weight and bias a factor can multiply."""
    while ref.name in body:
        node = nodes[ref.name]
        if node.base in AFFINE:
            held = []
            for place in AFFINE[node.base]:
                arg = node.args[place] if len(node.args) > place else node.kwargs.get("weight" if place else "bias")
                if isinstance(arg, Ref):
                    held.append(arg)
            names = [state.traced.parameters.get(arg.name) for arg in held]
            own = all(name is not None and tensor_users[name] == {node.name} for name in names)
            return tuple(str(name) for name in names) if held and own else None
        refs = references(node)
        if node.base == "mul":  # a scale that is a parameter, or the data under a computed one
            for one in refs:
                name = state.traced.parameters.get(one.name)
                if name is not None and tensor_users[name] == {node.name}:
                    return (name,)
            ref = refs[0]
        elif node.base == "getitem" or node.base in PASSING:
            ref = node.args[0]
        else:
            return None
        if len(users.get(ref.name, ())) > 1:
            return None
    return None
