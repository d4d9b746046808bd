"""The graph form of a shrunk model: its exported operations with every literal set anew, as a plain module.

Eager code may hold sizes as numbers, in a view or a split, and then cannot run smaller. In the exported graph every
such number stands at an axis that the analysis knows, so it can be set exactly. The result is a `torch.nn.Module` with
the model's own parameter names: it trains (dropout and batch norm follow `train()` and `eval()`), moves, copies, is
saved and exported like any other, and takes batches of any size where the model's code does.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from prunus.axes import Graph, Keep
from prunus.errors import InexactSurgery, ModelError
from prunus.graph import Analysis, Traced, branches, named_groups, resolve, trace, walk
from prunus.surgery.rewrite import Rewriting
from prunus.surgery.trial import Inputs
from prunus.terms import Both, Cat, Prod, Term

MODES = {"dropout": 2, "feature_dropout": 2, "alpha_dropout": 2, "feature_alpha_dropout": 2, "batch_norm": 5}


class Program(nn.Module):
    """A shrunk model as its exported operations.

    Args:
        tensors: a module whose parameters and buffers, by name, are the program's.
        graph: the operations; its placeholders are tensors by name, then the inputs.
        places: for every placeholder the tensor's name, or None for an input.
        constants: tensors that stand in the code, by placeholder's name.
        call: how inputs are given.
        traced_as: the device and precision that the operations were exported in.
    """

    def __init__(
        self,
        tensors: nn.Module,
        graph: torch.fx.GraphModule,
        places: list[str | None],
        constants: Mapping[str, Tensor],
        call: "Call",
        traced_as: tuple[torch.device, torch.dtype],
    ) -> None:
        super().__init__()
        self._hold(tensors)
        self._graph = [graph]  # in a list: it is no submodule, its tensors are this module's own
        self._places = places
        self._call = call
        self._modes = [
            (number, k, place)
            for number, one in enumerate(_graphs(graph))
            for k, node in enumerate(one.nodes)
            if (place := MODES.get(_base(node))) is not None and len(node.args) > place and node.args[place] is False
        ]
        self._device, self._dtype = traced_as
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)
        self.training = False
        self._follow()

    def _hold(self, tensors: nn.Module) -> None:
        """Take over a module's parameters and buffers, under their names, without its code."""
        made: dict[int, nn.Module] = {id(tensors): self}
        for path, module in tensors.named_modules(remove_duplicate=False):
            if path:
                above, _, leaf = path.rpartition(".")
                mine = made.setdefault(id(module), Part(type(module).__name__))
                self.get_submodule(above).add_module(leaf, mine)
            mine = made[id(module)]
            for name, value in module._parameters.items():
                mine._parameters[name] = value
            for name, buffer in module._buffers.items():
                mine.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operations."""
        leaves = iter(self._call.leaves(args, kwargs))
        every = [next(leaves) if place is None else _tensor(self, place) for place in self._places]
        return self._call.result(self._graph[0](*every))

    def train(self, mode: bool = True) -> "Program":
        """Let dropout and batch norm train or evaluate, as in the model that was exported."""
        if mode != self.training:
            graphs = [list(graph.nodes) for graph in _graphs(self._graph[0])]
            for number, k, place in self._modes:
                graphs[number][k].update_arg(place, mode)
            self._compile()
        return super().train(mode)

    def _compile(self) -> None:
        for module in self._graph[0].modules():
            if isinstance(module, torch.fx.GraphModule):
                module.recompile()

    def _apply(self, fn: Any, recurse: bool = True) -> "Program":
        """Move or convert, and the operations with it."""
        super()._apply(fn, recurse)
        self._follow()
        return self

    def _follow(self) -> None:
        """Let what the operations make lie where the parameters do, and in their precision."""
        one = next(p for p in self.parameters() if p.is_floating_point() or p.is_complex())
        device, dtype = one.device, one.dtype
        if (device, dtype) == (self._device, self._dtype):
            return

        def change(arg: Any) -> Any:
            if isinstance(arg, torch.device):
                return device
            floating = isinstance(arg, torch.dtype) and arg.is_floating_point
            return dtype if floating and dtype != self._dtype else arg

        for graph in _graphs(self._graph[0]):
            for node in graph.nodes:
                node.args = torch.fx.node.map_aggregate(node.args, change)
                node.kwargs = torch.fx.node.map_aggregate(node.kwargs, change)
        self._device, self._dtype = device, dtype
        self._compile()

    def extra_repr(self) -> str:
        """How many operations there are."""
        return f"{sum(n.op == 'call_function' for g in _graphs(self._graph[0]) for n in g.nodes)} operations"


class Part(nn.Module):
    """Holds the parameters of what was a module of the original."""

    def __init__(self, was: str) -> None:
        super().__init__()
        self.was = was

    def extra_repr(self) -> str:
        """What it was, and what it holds."""
        held = ", ".join(f"{name} {tuple(p.shape)}" for name, p in self._parameters.items() if p is not None)
        return self.was + (f": {held}" if held else "")


class Call:
    """How a program takes its inputs and gives its outputs: as the model did in the example."""

    def __init__(self, model: nn.Module, inputs: Inputs, outputs: TreeSpec, kept: list[int]) -> None:
        self.signature = inspect.signature(type(model).forward)
        parameters = list(self.signature.parameters.values())[1:]
        self.signature = self.signature.replace(parameters=parameters)
        self.free = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        self.by_position = [p.name for p in parameters][: len(inputs.args)]
        self.by_name = list(inputs.kwargs)
        leaves, self.inputs = tree_flatten((tuple(inputs.args), dict(inputs.kwargs)))
        self.fixed = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        self.outputs = outputs
        self.kept = kept

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The tensors of a call in the program's order."""
        flat, spec = tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.inputs and not self.free:
            try:
                given = dict(self.signature.bind(*args, **kwargs).arguments)
            except TypeError as error:
                raise ModelError(f"This shrunk program cannot be called so: {error}.") from error
            names = [*self.by_position, *self.by_name]
            left = [name for name, value in given.items() if name not in names and value is not None]
            if left or any(name not in given for name in names):
                raise ModelError(
                    f"This shrunk program was exported for the inputs {', '.join(names)}; it takes these and no others."
                )
            ordered = (tuple(given[n] for n in self.by_position), {n: given[n] for n in self.by_name})
            flat, spec = tree_flatten(ordered)
        if spec != self.inputs:
            raise ModelError("This shrunk program takes inputs of the same structure as the example inputs alone.")
        for leaf, fixed in zip(flat, self.fixed, strict=True):
            if fixed is not None and (isinstance(leaf, Tensor) or leaf != fixed[0]):
                leaf = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
                raise ModelError(f"This shrunk program was exported with {fixed[0]!r}, which cannot become {leaf}.")
        return flat

    def result(self, flat: Any) -> Any:
        """What the model would return."""
        return tree_unflatten([flat[k] for k in self.kept], self.outputs)


class Exported:
    """A dense model's operations, walked over once, from which programs are made for any Keep."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model = model
        self.inputs = inputs
        self.traced: Traced = trace(model, inputs.args, inputs.kwargs, batches=True)
        self.state: Analysis = walk(self.traced)
        one = next(p for p in model.parameters() if p.is_floating_point() or p.is_complex())
        self.traced_as = one.device, one.dtype

    def check(self, graph: Graph) -> dict[int, tuple[str, str]]:
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

    def shrunk(self, graph: Graph, keep: Keep, tensors: nn.Module) -> Program:
        """The program with a Keep's units alone.

        Args:
            graph: the analysis.
            keep: a closed Keep.
            tensors: a module that holds the sliced tensors by name; those of closed branches are taken out of it.
        """
        names = self.check(graph)
        program = self.traced.program
        assert program is not None
        module, nodes = _copied(program.graph_module)
        rewriting = Rewriting(self.state, names, keep, nodes)
        for one in self.traced.nodes:
            rewriting.apply(one)
        for branch in branches(self.state) if graph.branches else ():
            if branch.name in graph.sizes and not keep.units[branch.name].any():
                rewriting.cut(branch, self.traced)
        gone = graph.closed_branches(keep)
        gone |= {alias for alias, name in graph.aliases.items() if name in gone}
        selected = [m for m in graph.selections if hasattr(tensors.get_submodule(m), "selected")]
        places: list[str | None] = []
        constants: dict[str, Tensor] = {}
        unused: list[torch.fx.Node] = []
        for spec, taken in zip(program.graph_signature.input_specs, list(module.graph.nodes), strict=False):
            if str(spec.target) in gone and spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                unused.append(taken)
                continue
            if spec.kind == InputKind.USER_INPUT:
                places.append(None)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                places.append(str(spec.target))
            else:
                name = f"constant_{len(constants)}"
                value = program.constants[str(spec.target)]
                if not isinstance(value, Tensor):
                    raise ModelError(f"The model holds {type(value).__name__} objects, which a program cannot keep.")
                constants[name] = value
                places.append(name)
        for name in selected:
            places.append(f"{name}.selected")
            rewriting.select(self.state, f"{name}.weight", f"{name}.selected")
        for inner in module.modules():
            if isinstance(inner, torch.fx.GraphModule):
                inner.graph.eliminate_dead_code(rewriting.stays)
        for node in unused:
            module.graph.erase_node(node)
        for inner in module.modules():
            if isinstance(inner, torch.fx.GraphModule):
                inner.graph.lint()
                inner.recompile()
        specs = program.graph_signature.output_specs
        kept = [k for k, spec in enumerate(specs) if spec.kind == OutputKind.USER_OUTPUT]
        assert program.call_spec.out_spec is not None
        call = Call(self.model, self.inputs, program.call_spec.out_spec, kept)
        for name in gone:
            path, _, leaf = name.rpartition(".")
            owner = tensors.get_submodule(path)
            (owner._parameters if leaf in owner._parameters else owner._buffers).pop(leaf)
        result = Program(tensors, module, places, constants, call, self.traced_as)
        return result.train(tensors.training)


def _without_fine(term: Term) -> Term:
    if isinstance(term, Both):
        return _without_fine(term.base)
    if isinstance(term, Prod):
        return Prod(tuple(map(_without_fine, term.factors)))
    return Cat(tuple(map(_without_fine, term.segments))) if isinstance(term, Cat) else term


def _tensor(module: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    for part in path.split(".") if path else ():
        module = module._modules[part]  # type: ignore[assignment]
    return module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]


def _copied(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node]]:
    """Copy operations, those of regions too, and say which became which."""
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    graph = torch.fx.Graph()
    output = graph.graph_copy(module.graph, nodes)
    graph.output(output)
    held: dict[str, Any] = {}
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


def _graphs(module: torch.fx.GraphModule) -> list[torch.fx.Graph]:
    return [inner.graph for inner in module.modules() if isinstance(inner, torch.fx.GraphModule)]


def _base(node: torch.fx.Node) -> str:
    target = node.target
    return target._opname.rstrip("_") if isinstance(target, torch._ops.OpOverload) else ""
