"""From a dense model's exported operations to programs with fewer units."""

from contextlib import suppress

import torch
from torch import Tensor, nn

from prunus.axes import Graph, Keep
from prunus.errors import InexactSurgery, ModelError
from prunus.graph import InputKind, OutputKind, branches, named_groups, resolve, trace, walk
from prunus.surgery.call import Call, Shape
from prunus.surgery.program import Operations, Program
from prunus.surgery.rewrite import Rewriting
from prunus.surgery.trial import Inputs
from prunus.terms import Both, Cat, Prod, Term


class Exported:
    """A dense model's operations, walked over once, from which programs are made for any Keep.

    Args:
        model: the dense model.
        inputs: example inputs.
        training: export what it does in training mode too; trials only need the other.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, *, training: bool = True) -> None:
        one = next(p for p in model.parameters() if p.is_floating_point() or p.is_complex())
        self.traced_as = one.device, one.dtype
        self.evaluating = _Mode(model, inputs, False)
        self.training: _Mode | None = None
        if training:
            with suppress(ModelError):  # the program says so when it is trained
                self.training = _Mode(model, inputs, True)

    def shrunk(self, graph: Graph, keep: Keep, tensors: nn.Module) -> Program:
        """The program with a Keep's units alone.

        Args:
            graph: the analysis.
            keep: a closed Keep.
            tensors: a module that holds the sliced tensors by name; those of closed branches are taken out of it.

        Raises:
            InexactSurgery: the operations are not those that were analysed.
        """
        gone = graph.closed_branches(keep)
        gone |= {alias for alias, name in graph.aliases.items() if name in gone}
        evaluating = self.evaluating.operations(graph, keep, tensors, gone, "constant")
        training = None
        if self.training is not None:
            with suppress(InexactSurgery):  # what runs in training alone couples its axes otherwise
                training = self.training.operations(graph, keep, tensors, gone, "training_constant")
        for name in gone:
            path, _, leaf = name.rpartition(".")
            owner = tensors.get_submodule(path)
            (owner._parameters if leaf in owner._parameters else owner._buffers).pop(leaf)
        return Program(tensors, evaluating, training, self.traced_as).train(tensors.training)


class _Mode:
    """A model's operations in one mode."""

    def __init__(self, model: nn.Module, inputs: Inputs, training: bool) -> None:
        self.model = model
        self.inputs = inputs
        self.traced = trace(model, inputs.args, inputs.kwargs, batches=True, training=training)
        self.state = walk(self.traced)

    def names(self, graph: Graph) -> dict[int, tuple[str, str]]:
        """Name what is in a graph's groups here.

        Raises:
            InexactSurgery: it lies elsewhere than the graph says.
        """
        names = {key: value for key, value in named_groups(self.state).items() if value[0] in graph.sizes}
        for tensor, terms in graph.axes.items():
            here = tuple(resolve(var, names) for var in self.state.tensors[tensor])
            if here != tuple(map(_without_fine, terms)):
                raise InexactSurgery(f"The exported graph says something else of {tensor!r} than the analysis did.")
        return names

    def operations(self, graph: Graph, keep: Keep, tensors: nn.Module, gone: set[str], constant: str) -> Operations:
        """Set every literal anew, and leave out closed branches."""
        program = self.traced.program
        assert program is not None
        assert program.call_spec.out_spec is not None
        module, nodes = _copied(program.graph_module)
        rewriting = Rewriting(self.state, self.names(graph), keep, nodes)
        for one in self.traced.nodes:
            rewriting.apply(one)
        closed = {g.name for g in graph.groups if g.vanishes and not keep.units[g.name].any()}
        for branch in branches(self.state) if closed else ():
            if branch.name in closed:
                rewriting.cut(branch, self.traced)
                closed.remove(branch.name)
        if closed:
            raise InexactSurgery(f"The exported graph has no branch {min(closed)!r}.")
        places: list[str | None] = []
        constants: dict[str, Tensor] = {}
        shapes: list[Shape | None] = []
        unused: list[torch.fx.Node] = []
        for spec, taken in zip(program.graph_signature.input_specs, list(module.graph.nodes), strict=False):
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                if str(spec.target) in gone:
                    unused.append(taken)
                else:
                    places.append(str(spec.target))
            elif spec.kind == InputKind.USER_INPUT:
                places.append(None)
                shapes.append(_shape(taken))
            else:
                value = program.constants[str(spec.target)]
                if not isinstance(value, Tensor):
                    raise ModelError(f"The model holds {type(value).__name__} objects, which a program cannot keep.")
                places.append(f"{constant}_{len(constants)}")
                constants[f"{constant}_{len(constants)}"] = value
        for name in graph.selections:
            if hasattr(tensors.get_submodule(name), "selected"):
                places.append(f"{name}.selected")
                rewriting.select(self.state, f"{name}.weight", f"{name}.selected")
        _tidy(module, rewriting, unused)
        specs = program.graph_signature.output_specs
        kept = [k for k, spec in enumerate(specs) if spec.kind == OutputKind.USER_OUTPUT]
        call = Call(self.model, self.inputs, shapes, program.call_spec.out_spec, kept)
        return Operations(module, places, constants, call)


def _shape(taken: torch.fx.Node) -> Shape | None:
    """The sizes of an input, None where export left one free."""
    value = taken.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return tuple(size.node.maybe_as_int() if isinstance(size, torch.SymInt) else int(size) for size in value.shape)


def _tidy(module: torch.fx.GraphModule, rewriting: Rewriting, unused: list[torch.fx.Node]) -> None:
    """Take out what nobody uses any more, and make code of the rest."""
    for user in [user for node in unused for user in node.users]:
        if set(user.all_input_nodes) <= set(unused):  # a batch norm's count of its batches
            rewriting.gone.add(user)
    inner = [one for one in module.modules() if isinstance(one, torch.fx.GraphModule)]
    for one in inner:
        one.graph.eliminate_dead_code(rewriting.stays)
    for node in unused:
        if node.users:
            raise InexactSurgery(f"What is left of the network still reads {node.target}, which stood in a branch.")
        module.graph.erase_node(node)
    for one in inner:
        one.graph.lint()
        one.recompile()


def _without_fine(term: Term) -> Term:
    if isinstance(term, Both):
        return _without_fine(term.base)
    if isinstance(term, Prod):
        return Prod(tuple(map(_without_fine, term.factors)))
    return Cat(tuple(map(_without_fine, term.segments))) if isinstance(term, Cat) else term


def _copied(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node]]:
    """Copy operations, those of regions too, and say which became which."""
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, nodes))
    held: dict[str, object] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if isinstance(value, torch.fx.GraphModule):
                value, more = _copied(value)
                nodes |= more
            held[str(node.target)] = value
    return torch.fx.GraphModule(held, graph), nodes
