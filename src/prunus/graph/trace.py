"""The one file that touches `torch.export`: a model and example inputs become a plain list of operations.

The graph is exported raw (not decomposed) and non-strict, which is what takes the models that people use; parameters
and buffers keep the names they have in the model.
"""

import copy
import io
import logging
import operator
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils.flop_counter import FlopCounterMode

from prunus.axes import Stored
from prunus.errors import ModelError, said


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
    macs: int = 0  # what PyTorch counts for it

    @property
    def base(self) -> str:
        """The operation without namespace, overload and in-place mark: `aten.relu_.default` is `relu`."""
        parts = self.op.split(".")
        name = parts[1] if len(parts) > 1 else parts[0]
        return name.rstrip("_") if not name.endswith("__") else name


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


def _refs(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, list | tuple):
        return tuple(_refs(v) for v in value)
    return value


def _shapes(value: Any) -> tuple[tuple[int, ...] | None, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(tuple(int(s) for s in v.shape) if isinstance(v, Tensor) else None for v in values)


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).removeprefix("L['self'].").removeprefix("L['self']")


def _macs(node: torch.fx.Node) -> int:
    """Multiply-accumulates of one operation, counted by PyTorch on tensors without storage."""
    if not isinstance(node.target, torch._ops.OpOverload):  # a region, as under torch.no_grad: all that stands in it
        inner = [
            getattr(node.graph.owning_module, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"
        ]
        graphs = [module.graph for module in inner if isinstance(module, torch.fx.GraphModule)]
        return sum(_macs(n) for graph in graphs for n in graph.nodes if n.op == "call_function")
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            node.target(*args, **kwargs)
    except Exception:  # an operation that only runs on real tensors: PyTorch cannot count it
        return 0
    return counter.get_total_flops() // 2


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportedProgram:
    training = {name: module.training for name, module in model.named_modules()}
    model.eval()
    quiet = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # What torch logs, prints and warns of on its way to an error is not what the user needs: that is told below.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return torch.export.export(model, args, dict(kwargs) or None, strict=False)
    except Exception as error:
        why = "it branches on the values of tensors" if "DataDependent" in type(error).__name__ else said(error)
        raise ModelError(
            f"The model {type(model).__name__} cannot be exported on these example inputs ({why}). Prunus needs a "
            "forward pass that runs on them and does not branch on the values of tensors."
        ) from error
    finally:
        logging.disable(quiet)
        for name, module in model.named_modules():
            module.training = training[name]


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Traced:
    """Export a model in evaluation mode and list its operations.

    Raises:
        ModelError: the model is no module, or cannot be exported on these inputs.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"A model must be a torch.nn.Module; this is a {type(model).__name__}.")
    tensors, aliases = stored_tensors(model)
    if not any(stored.is_parameter for stored in tensors.values()):
        raise ModelError(f"The model {type(model).__name__} has no parameters: there is nothing to shrink.")
    program = _export(model, args, kwargs or {})
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
    nodes, outputs = [], []
    for node in program.graph.nodes:
        if node.op == "output":
            outputs = [n.name for n in node.all_input_nodes]
        elif node.op == "get_attr":
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                constants[node.name] = tuple(value.shape)
        elif node.op == "call_function":
            target = node.target
            if target is operator.getitem:
                op = "getitem"
            elif isinstance(target, torch._ops.OpOverload):
                op = f"{target.namespace}.{target._opname}.{target._overloadname}"
            else:
                op = getattr(target, "__name__", str(target))
            tags = target.tags if isinstance(target, torch._ops.OpOverload) else []
            nodes.append(
                Node(
                    name=node.name,
                    op=op,
                    args=_refs(node.args),
                    kwargs={key: _refs(value) for key, value in node.kwargs.items()},
                    shapes=_shapes(node.meta.get("val")),
                    module=_module_path(node),
                    pointwise=torch.Tag.pointwise in tags,
                    macs=0 if torch.Tag.pointwise in tags else _macs(node),
                )
            )
    first = next(
        (t for t in torch.utils._pytree.tree_leaves((args, dict(kwargs or {}))) if isinstance(t, Tensor)), None
    )
    batch = int(first.shape[0]) if first is not None and first.dim() > 0 else 1
    modules = {
        name: type(module).__module__ + "." + type(module).__qualname__ for name, module in model.named_modules()
    }
    return Traced(
        tuple(nodes), parameters, constants, inputs, tuple(outputs), tensors, aliases, batch, copy.copy(modules)
    )
