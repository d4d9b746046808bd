"""The graph form of a shrunk model: its exported operations with every literal set anew, as a plain module.

Eager code may hold sizes as numbers, in a view or a split, and then cannot run smaller. In the exported graph every
such number stands at an axis that the analysis knows, so it can be set exactly. The result is a `torch.nn.Module` with
the model's own parameter names: it trains by the operations that the model has in training mode, moves, copies, is
saved and exported like any other, and takes batches of any size where the model's code does.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from prunus.errors import warn
from prunus.surgery.call import Call


class Operations:
    """What runs in one mode.

    Args:
        graph: the operations; its placeholders are tensors by name, then the inputs.
        places: for every placeholder the tensor's name, or None for an input.
        constants: tensors that stand in the code, by the name that they have in `places`.
        call: how inputs are given.
    """

    def __init__(
        self, graph: torch.fx.GraphModule, places: list[str | None], constants: Mapping[str, Tensor], call: Call
    ) -> None:
        self.graph = graph
        self.places = places
        self.constants = dict(constants)
        self.call = call

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on a module's tensors."""
        leaves = iter(self.call.leaves(args, kwargs))
        every = [next(leaves) if place is None else _tensor(module, place) for place in self.places]
        return self.call.result(self.graph(*every))

    def graphs(self) -> list[torch.fx.Graph]:
        """The operations and those of their regions."""
        return [inner.graph for inner in self.graph.modules() if isinstance(inner, torch.fx.GraphModule)]

    def follow(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Let what the operations make lie on a device; in a precision, if that changed."""

        def change(arg: Any) -> Any:
            if isinstance(arg, torch.device):
                return device
            return dtype if dtype is not None and isinstance(arg, torch.dtype) and arg.is_floating_point else arg

        for inner in self.graph.modules():
            if isinstance(inner, torch.fx.GraphModule):
                for node in inner.graph.nodes:
                    node.args = torch.fx.node.map_aggregate(node.args, change)
                    node.kwargs = torch.fx.node.map_aggregate(node.kwargs, change)
                inner.recompile()


class Program(nn.Module):
    """A shrunk model as its exported operations.

    Args:
        tensors: a module whose parameters and buffers, by name, are the program's.
        evaluating: the operations in evaluation mode.
        training: those in training mode; None where the model cannot be exported so.
        traced_as: the device and precision that they were exported in.
    """

    def __init__(
        self,
        tensors: nn.Module,
        evaluating: Operations,
        training: Operations | None,
        traced_as: tuple[torch.device, torch.dtype],
    ) -> None:
        super().__init__()
        self._hold(tensors)
        self._evaluating = evaluating
        self._training = training
        for operations in (evaluating, training):
            for name, value in operations.constants.items() if operations is not None else ():
                self.register_buffer(name, value, persistent=False)
        self._device, self._dtype = traced_as
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
        operations = self._evaluating
        if self.training and self._training is not None:
            operations = self._training
        elif self.training:
            warn(
                "This model's training mode could not be exported: the shrunk program trains by the operations of its "
                "evaluation mode, without dropout and with fixed batch statistics."
            )
        return operations.run(self, args, kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> "Program":
        """Move or convert, and the operations with it."""
        super()._apply(fn, recurse)
        self._follow()
        return self

    def _follow(self) -> None:
        """Let what the operations make lie where the parameters do, and in their precision."""
        one = next(p for p in self.parameters() if p.is_floating_point() or p.is_complex())
        device, dtype = one.device, one.dtype
        if (device, dtype) != (self._device, self._dtype):
            for operations in (self._evaluating, self._training):
                if operations is not None:
                    operations.follow(device, dtype if dtype != self._dtype else None)
            self._device, self._dtype = device, dtype

    def extra_repr(self) -> str:
        """How many operations there are."""
        graphs = self._evaluating.graphs()
        return f"{sum(node.op == 'call_function' for graph in graphs for node in graph.nodes)} operations"


class Part(nn.Module):
    """Holds the parameters of what was a module of the original."""

    def __init__(self, was: str) -> None:
        super().__init__()
        self.was = was

    def extra_repr(self) -> str:
        """What it was, and what it holds."""
        held = ", ".join(f"{name} {tuple(p.shape)}" for name, p in self._parameters.items() if p is not None)
        return self.was + (f": {held}" if held else "")


def _tensor(module: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    for part in path.split(".") if path else ():
        module = module._modules[part]  # type: ignore[assignment]
    return module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]
