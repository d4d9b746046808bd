"""The rules applied to all operations of a traced model, in order."""

from prunus.graph.analysis import Analysis, references
from prunus.graph.rules import apply
from prunus.graph.trace import Traced
from prunus.graph.unify import Reason, Var, freeze

SEEN = {"aten.embedding.default"}  # uses of a weight beside its reading that see its gates and stay exact


def walk(traced: Traced) -> Analysis:
    """Apply the rules to all operations in order, then freeze what no gate may touch."""
    state = Analysis(traced)
    for name, stored in traced.tensors.items():
        state.tensors[name] = [Var(size) for size in stored.shape]
    for node_name, owner in traced.parameters.items():
        state.dims[node_name] = [state.tensors[owner]]
        state.views[node_name] = (owner, tuple(range(len(state.tensors[owner]))))
    for node_name, shape in traced.constants.items():
        state.dims[node_name] = [[_frozen(size, Reason("literal tensor in the code", "")) for size in shape]]
    for node_name, shape in traced.inputs.items():
        state.dims[node_name] = [[_frozen(size, Reason("network input", "")) for size in shape]]
    for node in traced.nodes:
        before = len(state.contractions)
        state.dims[node.name] = apply(state, node)
        read = {c.tensor for c in state.contractions[before:]}
        for ref in references(node):
            tensor = state.tensor_of(ref)
            if tensor is not None and tensor not in read and node.name not in state.views:
                state.uses.setdefault(tensor, []).append((node.op, node.name))
    for name in traced.outputs:
        for dims in state.dims.get(name, []):
            for var in dims:
                freeze(var, Reason("network output", ""))
    for contraction in state.contractions:
        strange = sorted(role for role, _ in state.uses[contraction.tensor] if role not in SEEN)
        strange = [role for role in strange if not role.startswith("contracted along ")]
        if strange:  # a gate on this weight would be seen by its other use too
            freeze(contraction.axis, Reason(f"{contraction.tensor} also used by {strange[0]}", contraction.node.module))
    return state


def _frozen(size: int, reason: Reason) -> Var:
    var = Var(size)
    freeze(var, reason)
    return var
