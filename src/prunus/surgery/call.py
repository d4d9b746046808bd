"""How a program is called: inputs in, as the example's were given; outputs back, as the model returned them."""

import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from prunus.errors import ModelError
from prunus.surgery.trial import Inputs

Shape = tuple[int | None, ...]


class Call:
    """One way of calling.

    Args:
        model: the model that was exported.
        inputs: the example inputs.
        shapes: the sizes of every input, None where any will do; None for what is no tensor.
        outputs: the structure of what is returned.
        kept: which of the operations' results are the model's.
    """

    def __init__(
        self, model: nn.Module, inputs: Inputs, shapes: list[Shape | None], outputs: TreeSpec, kept: list[int]
    ) -> None:
        signature = inspect.signature(type(model).forward)
        parameters = list(signature.parameters.values())[1:]
        self.signature = signature.replace(parameters=parameters)
        self.free = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        self.by_position = [p.name for p in parameters][: len(inputs.args)]
        self.by_name = list(inputs.kwargs)
        leaves, self.inputs = tree_flatten((tuple(inputs.args), dict(inputs.kwargs)))
        self.fixed = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        self.shapes = shapes
        self.outputs = outputs
        self.kept = kept

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The inputs of a call in the operations' order.

        Raises:
            ModelError: they are not like the example's.
        """
        flat, spec = tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.inputs and not self.free:
            flat, spec = tree_flatten(self._ordered(args, kwargs))
        if spec != self.inputs:
            raise ModelError("This shrunk program takes inputs of the same structure as the example inputs alone.")
        for leaf, fixed, shape in zip(flat, self.fixed, self.shapes, strict=True):
            if fixed is not None:
                if isinstance(leaf, Tensor) or type(leaf) is not type(fixed[0]) or leaf != fixed[0]:
                    other = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
                    raise ModelError(
                        f"This shrunk program was exported with {fixed[0]!r}, which cannot become {other}."
                    )
            elif not isinstance(leaf, Tensor):
                raise ModelError(f"This shrunk program takes a tensor where it was given a {type(leaf).__name__}.")
            elif shape is not None and not _fits(tuple(leaf.shape), shape):
                wanted = " x ".join("any" if size is None else str(size) for size in shape)
                raise ModelError(
                    f"This shrunk program was exported for inputs of {wanted or 'no'} numbers; this one has the shape "
                    f"{tuple(leaf.shape)}."
                )
        return flat

    def _ordered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call, with the same inputs by position and by name as in the example."""
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
        return tuple(given[n] for n in self.by_position), {n: given[n] for n in self.by_name}

    def result(self, flat: Any) -> Any:
        """What the model would return."""
        return tree_unflatten([flat[k] for k in self.kept], self.outputs)


def _fits(shape: tuple[int, ...], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))
