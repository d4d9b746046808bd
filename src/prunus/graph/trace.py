"""The one file that touches `torch.export`: a model and example inputs become a plain list of operations.

The graph is exported raw (not decomposed) and non-strict, which is what takes the models that people use; parameters
and buffers keep the names they have in the model.
"""

import inspect
import io
import logging
import operator
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import tree_leaves, tree_map

from prunus.axes import Stored
from prunus.errors import ModelError, said
from prunus.measure import batch_size, counting, with_batch

__all__ = ["InputKind", "Node", "OutputKind", "Ref", "Traced", "stored_tensors", "trace"]


@dataclass(frozen=True)
class Ref:
    """Another node's result."""

    name: str


@dataclass(frozen=True)
class Node:
    """One operation: its name in PyTorch, its arguments, the shapes it yields, and the module it stands in."""

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[tuple[int, ...] | None, ...]
    module: str
    pointwise: bool = False
    fx: torch.fx.Node | None = field(default=None, compare=False, repr=False)

    @property
    def base(self) -> str:
        """The operation without namespace, overload and in-place mark: `aten.relu_.default` is `relu`."""
        parts = self.op.split(".")
        name = parts[1] if len(parts) > 1 else parts[0]
        return name.rstrip("_") if not name.endswith("__") else name

    @property
    def in_region(self) -> bool:
        """Does it stand in a region, as under `with torch.no_grad()`?"""
        return "." in self.name

    @property
    def macs(self) -> int:
        """Its multiply-accumulates, counted by PyTorch on tensors without storage."""
        return _macs(self.fx) if self.fx is not None else 0


@dataclass(frozen=True)
class Traced:
    """A model as a list of operations."""

    nodes: tuple[Node, ...]
    parameters: dict[str, str]  # node name -> canonical tensor name
    constants: dict[str, tuple[int, ...]]  # node name -> shape of a literal tensor in the code
    inputs: dict[str, tuple[int, ...]]  # node name -> shape
    outputs: tuple[str, ...]
    tensors: dict[str, Stored]
    aliases: dict[str, str]
    batch: int
    modules: dict[str, str]  # module path -> class name, exact
    program: ExportedProgram | None = field(default=None, compare=False, repr=False)


def stored_tensors(model: nn.Module) -> tuple[dict[str, Stored], dict[str, str]]:
    """List the model's tensors as they are stored; every further name of a shared tensor is an alias of the first."""
    persistent = {key.removesuffix("._extra_state") for key in model.state_dict()}
    tensors: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    seen: dict[int, str] = {}
    named: list[tuple[str, Tensor, bool]] = [
        (n, t, True) for n, t in model.named_parameters(remove_duplicate=False)
    ] + [(n, t, False) for n, t in model.named_buffers(remove_duplicate=False)]
    for name, tensor, is_parameter in named:
        if id(tensor) in seen:
            aliases[name] = seen[id(tensor)]
            continue
        seen[id(tensor)] = name
        tensors[name] = Stored(tuple(tensor.shape), tensor.element_size(), is_parameter, name in persistent)
    return tensors, aliases


def _size(size: Any) -> int:
    """A size as the example has it, read without making it a condition of the graph."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _refs(value: Any, names: Mapping[torch.fx.Node, str]) -> Any:
    if isinstance(value, torch.fx.Node):
        held = value.meta.get("val")
        return _size(held) if isinstance(held, torch.SymInt) else Ref(names.get(value, value.name))
    if isinstance(value, list | tuple):
        return tuple(_refs(v, names) for v in value)
    return value


def _shapes(value: Any) -> tuple[tuple[int, ...] | None, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(tuple(_size(s) for s in v.shape) if isinstance(v, Tensor) else None for v in values)


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).removeprefix("L['self'].").removeprefix("L['self']")


def _macs(node: torch.fx.Node) -> int:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    try:
        with counting() as counter, torch.no_grad():
            node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # an operation that only runs on real tensors: PyTorch cannot count it
        return 0
    return counter.get_total_flops() // 2


def _region(node: torch.fx.Node) -> tuple[torch.fx.Graph, list[torch.fx.Node]] | None:
    """The operations under a `with torch.no_grad()` and the like, and what they take; None for other operations."""
    if not str(getattr(node.target, "__name__", "")).startswith("wrap_with_"):
        return None
    for k, arg in enumerate(node.args):
        inner = getattr(node.graph.owning_module, str(getattr(arg, "target", "")), None)
        if isinstance(inner, torch.fx.GraphModule):
            return inner.graph, [n for n in node.args[k + 1 :] if isinstance(n, torch.fx.Node)]
    return None


def _listed(
    graph: torch.fx.Graph, names: dict[torch.fx.Node, str], constants: dict[str, tuple[int, ...]], prefix: str = ""
) -> tuple[list[Node], tuple[str, ...]]:
    """The operations of a graph in order, regions unfolded, and the names of what comes out."""
    nodes: list[Node] = []
    outputs: tuple[str, ...] = ()
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        name = names.setdefault(node, prefix + node.name)
        if node.op == "output":
            outputs = tuple(names[n] for n in tree_leaves(node.args) if isinstance(n, torch.fx.Node))
        elif node.op == "get_attr":
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                constants[name] = _shapes(value)[0] or ()
        elif node.op == "call_function":
            region = _region(node)
            if region is None:
                nodes.append(_node(node, name, names))
                continue
            inner, taken = region
            places = [n for n in inner.nodes if n.op == "placeholder"]
            inside = names | {place: names[n] for place, n in zip(places, taken, strict=True)}
            more, results = _listed(inner, inside, constants, f"{name}.")
            nodes += more
            shapes = _shapes(node.meta.get("val"))
            nodes.append(Node(name, "region", tuple(map(Ref, results)), {}, shapes, _module_path(node), fx=node))
    return nodes, outputs


def _pointwise(target: torch._ops.OpOverload) -> bool:
    """Does PyTorch declare an operation elementwise, or that which it does in place?"""
    out_of_place = getattr(getattr(torch.ops, target.namespace), target._opname.rstrip("_"), None)
    same = getattr(out_of_place, target._overloadname, target)
    return torch.Tag.pointwise in target.tags or torch.Tag.pointwise in same.tags


def _node(node: torch.fx.Node, name: str, names: Mapping[torch.fx.Node, str]) -> Node:
    target = node.target
    if target is operator.getitem:
        op = "getitem"
    elif isinstance(target, torch._ops.OpOverload):
        op = f"{target.namespace}.{target._opname}.{target._overloadname}"
    else:
        op = getattr(target, "__name__", str(target))
    pointwise = isinstance(target, torch._ops.OpOverload) and _pointwise(target)
    return Node(
        name=name,
        op=op,
        args=_refs(node.args, names),
        kwargs={key: _refs(value, names) for key, value in node.kwargs.items()},
        shapes=_shapes(node.meta.get("val")),
        module=_module_path(node),
        pointwise=pointwise,
        fx=node,
    )


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, shapes: Any = None
) -> ExportedProgram:
    args, kwargs = _each_its_own((args, dict(kwargs)))
    modes = {name: module.training for name, module in model.named_modules()}
    model.train(training)
    quiet = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # What torch logs, prints and warns of on its way to an error is not what the user needs: that is told below.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return torch.export.export(model, args, dict(kwargs) or None, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        why = "it branches on the values of tensors" if "DataDependent" in type(error).__name__ else said(error)
        raise ModelError(
            f"The model {type(model).__name__} cannot be exported on these example inputs ({why}). Prunus needs a "
            "forward pass that runs on them and does not branch on the values of tensors."
        ) from error
    finally:
        logging.disable(quiet)
        for name, module in model.named_modules():
            module.training = modes[name]


def _each_its_own(inputs: Any) -> Any:
    """Inputs of which no two are one tensor: export would take these for the same input ever after."""
    seen: set[int] = set()

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and id(leaf) in seen:
            return leaf.clone()
        seen.add(id(leaf))
        return leaf

    return tree_map(one, inputs)


def _export_any_batch(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
) -> ExportedProgram:
    own = args, kwargs
    if batch_size(args, kwargs) == 1:  # export takes a size of one for a constant
        args, kwargs = with_batch(args, 2, kwargs)
    try:
        return _export(model, args, kwargs, training, any_batch(model, args, kwargs))
    except (ModelError, TypeError):
        # A model whose code fixes the batch: the program runs on batches of the example's size.
        return _export(model, *own, training)


def any_batch(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What export is told of the inputs' shapes: the first dimension of every tensor with the batch in it may vary."""
    batch = batch_size(args, kwargs)

    def free(leaf: Any) -> Any:
        varies = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return {0: torch.export.Dim.AUTO} if varies else None

    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return tree_map(free, dict(bound))


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    batches: bool = False,
    training: bool = False,
) -> Traced:
    """Export a model and list its operations.

    Args:
        model: the model.
        args, kwargs: example inputs.
        batches: leave the batch free where the model allows it, for a program that is to run.
        training: as it is in training mode, not in evaluation mode.

    Raises:
        ModelError: the model is no module, or cannot be exported on these inputs.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"A model must be a torch.nn.Module; this is a {type(model).__name__}.")
    tensors, aliases = stored_tensors(model)
    if not any(stored.is_parameter for stored in tensors.values()):
        raise ModelError(f"The model {type(model).__name__} has no parameters: there is nothing to shrink.")
    export = _export_any_batch if batches else _export
    program = export(model, args, kwargs or {}, training)
    signature = program.graph_signature
    parameters: dict[str, str] = {}
    constants: dict[str, tuple[int, ...]] = {}
    inputs: dict[str, tuple[int, ...]] = {}
    shape_of = {n.name: _shapes(n.meta.get("val")) for n in program.graph.nodes if n.op == "placeholder"}
    for spec in signature.input_specs:
        name = getattr(spec.arg, "name", None)
        if name is None:
            continue
        shape = shape_of[name][0] if shape_of.get(name) else None
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            target = str(spec.target)
            parameters[name] = aliases.get(target, target)
        elif shape is not None:
            (inputs if spec.kind == InputKind.USER_INPUT else constants)[name] = shape
    nodes, outputs = _listed(program.graph, {n: n.name for n in program.graph.nodes}, constants)
    first = next((t for t in tree_leaves((args, dict(kwargs or {}))) if isinstance(t, Tensor)), None)
    batch = int(first.shape[0]) if first is not None and first.dim() > 0 else 1
    modules = {
        name: type(module).__module__ + "." + type(module).__qualname__ for name, module in model.named_modules()
    }
    return Traced(tuple(nodes), parameters, constants, inputs, outputs, tensors, aliases, batch, modules, program)
