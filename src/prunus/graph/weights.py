"""Gates on weights where they stand, which become exact zeros: no axis shrinks."""

from prunus.axes import Frozen, Graph, Group
from prunus.graph.analysis import Analysis
from prunus.graph.resolve import works_of
from prunus.graph.trace import Traced
from prunus.scatter import Scattered, laid_out
from prunus.terms import Leaf, Term


def weights_graph(traced: Traced, state: Analysis, kind: Scattered) -> Graph:
    """Gates on single weights or blocks of every weight that a linear layer or a convolution multiplies with."""
    scattered: dict[str, Scattered] = {}
    frozen: dict[str, Frozen] = {}
    groups = []
    for usage in state.usages:  # depthwise convolutions too, which contract nothing
        name = usage.weight
        if not name or name in scattered or len({role for role, _ in state.uses[name]}) > 1:
            continue
        shape = traced.tensors[name].shape
        layout = laid_out(kind, name, shape)
        if kind.most and any(c.dim != 1 or not _in_rows(c.node.base) for c in state.contractions if c.tensor == name):
            layout = "its inputs do not lie along its rows"
        if isinstance(layout, str):
            frozen[name] = Frozen(name, layout, name.rpartition(".")[0])
            continue
        scattered[name] = layout
        unit = "weight" if kind.block == (1, 1) else "block"
        groups += [Group(group, size, unit, (), (), ()) for group, size in layout.units(shape).items()]
    axes: dict[str, tuple[Term, ...]] = {
        name: tuple(Leaf(None, size) for size in stored.shape) for name, stored in traced.tensors.items()
    }
    return Graph(
        axes=axes,
        groups=tuple(groups),
        frozen=tuple(frozen.values()),
        works=works_of(traced, state, {}),
        tensors=traced.tensors,
        aliases=traced.aliases,
        fixed_macs=state.fixed_macs / traced.batch,
        scattered=scattered,
    )


def _in_rows(operation: str) -> bool:
    """Does it read a weight's rows, each whole, in order: as a linear layer and a convolution do?"""
    return operation == "linear" or operation.startswith("conv")
