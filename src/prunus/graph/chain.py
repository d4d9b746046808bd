"""Why a group exists: the operations that couple its axes, in order."""

from collections.abc import Mapping

from prunus.axes import Step
from prunus.graph.analysis import Analysis, Dims, references
from prunus.graph.trace import Traced
from prunus.graph.unify import atoms


def chains(traced: Traced, state: Analysis, names: Mapping[int, tuple[str, str]]) -> dict[str, tuple[Step, ...]]:
    """List, group by group, the operations that make, read, join or pass on its units."""
    reads: dict[str, set[int]] = {}
    for c in state.contractions:
        reads.setdefault(c.node.name, set()).update(id(atom) for atom in atoms(c.axis))
    found: dict[str, list[Step]] = {}
    for node in traced.nodes:
        if node.op in ("getitem", "region"):
            continue
        out = {key for dims in state.dims[node.name] for key in _inside(dims)} & names.keys()
        taken = [_inside(state.dims[ref.name][0]) for ref in references(node) if not state.tensor_of(ref)]
        own = [_inside(state.dims[ref.name][0]) for ref in references(node) if state.tensor_of(ref)]
        for key in sorted(out | (reads.get(node.name, set()) & names.keys()), key=lambda k: names[k][0]):
            times = sum(key in one for one in taken)
            if key in reads.get(node.name, ()):
                role = "reads"
            elif times > 1:
                role = "joins"
            elif times == 1:
                role = "passes"
            elif any(key in one for one in own):
                role = "makes"
            else:
                continue
            found.setdefault(names[key][0], []).append(Step(role, node.op, node.module))
    return {name: tuple(steps) for name, steps in found.items()}


def _inside(dims: Dims) -> set[int]:
    return {id(atom) for var in dims for atom in atoms(var)}
