"""Models and data by name: the built-in ones, and the user's own as "package.module:function"."""

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from prunus.data import Dataset
from prunus.errors import ModelError, PrunusError, nearest, said
from prunus.models import MLP, LeNet5

BUILT_IN = ("mlp", "lenet5")
IMAGE = (1, 28, 28)


def shape_of(text: str) -> tuple[int, ...]:
    """Read the shape of example inputs.

    >>> shape_of("2x3x32x32")
    (2, 3, 32, 32)
    """
    parts = text.lower().replace(",", "x").split("x")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts) or len(parts) < 2:
        raise PrunusError(
            f"The input shape {text!r} cannot be read; write sizes with an x between them, the batch first, such as "
            "2x3x32x32."
        )
    return tuple(map(int, parts))


def device_of(name: str | None) -> str | None:
    """See that there is such a device."""
    if name is None:
        return None
    try:
        there = torch.device(name).type != "meta"
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):  # torch asserts if built without CUDA
        there = False
    if not there:
        found = ["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
        raise PrunusError(f"There is no device {name!r} here; there are: {', '.join(found)}.")
    return name


def model_and_inputs(name: str, seed: int, data: Dataset | None, inputs: str | None) -> tuple[nn.Module, Any]:
    """Make a model by its name, and example inputs: those asked for, else the model's own, else from the data.

    Args:
        name: one of `BUILT_IN`, or "package.module:factory".
        seed: torch is seeded with it before the model is made.
        data: the data it will be trained on, if any.
        inputs: the shape of example inputs.

    Raises:
        ModelError: there is no such model, it cannot be made, or nothing says what its inputs look like.
    """
    shape = shape_of(inputs) if inputs else None
    if name in BUILT_IN:
        one = tuple(data.train_x.shape[1:]) if data is not None else (shape or (1, *IMAGE))[1:]
        of = f"the data {data.name}" if data is not None else f"--input {inputs}"
        torch.manual_seed(seed)
        model = _built_in(name, one, of, data.classes if data is not None else 10)
        own = None if data is not None or shape else torch.randn(2, *one)
    elif ":" in name:
        model, own = _made(name, seed)
    else:
        raise ModelError(
            f'There is no model named {name!r}; {nearest(name, BUILT_IN)}. Your own is named as "pkg.mod:factory".'
        )
    if shape is not None:
        try:
            return model, torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        except (RuntimeError, MemoryError) as error:
            raise PrunusError(f"Example inputs of shape {inputs} do not fit into memory; give smaller ones.") from error
    if own is not None:
        return model, own
    if data is not None:
        return model, data.train_x[:2]
    raise ModelError(
        f"Nothing says what the inputs of {name} look like: give --input, such as --input 2x3x32x32, or let "
        "the factory return (module, example_inputs)."
    )


def _built_in(name: str, one: tuple[int, ...], of: str, classes: int) -> nn.Module:
    if name == "mlp":
        return MLP(inputs=math.prod(one), classes=classes)
    if one != IMAGE:
        raise ModelError(
            f"The model lenet5 takes images of 1x28x28; {of} has inputs of {'x'.join(map(str, one))}. Use --model mlp, "
            "or a model of your own."
        )
    return LeNet5(classes=classes)


def _made(name: str, seed: int) -> tuple[nn.Module, Any]:
    """Call the user's factory."""
    factory = _factory(name)
    torch.manual_seed(seed)
    try:
        made = factory()
    except PrunusError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"Calling {name}() raised {said(error)}.") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{name}() returned {type(made).__name__}, where a torch.nn.Module or (module, example_inputs) is expected."
        )
    leaves = torch.utils._pytree.tree_leaves(inputs)
    if inputs is not None and not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise ModelError(f"The example inputs that {name}() returned hold no tensor: {type(inputs).__name__}.")
    return model, inputs


def _factory(name: str) -> Callable[[], Any]:
    """Import what "package.module:factory" names; the current folder is importable."""
    module_name, _, path = name.partition(":")
    if not path or not all(word.isidentifier() for word in f"{module_name}.{path}".split(".")):
        raise ModelError(f'{name!r} names no model factory; write "package.module:factory", such as "mynets:resnet".')
    try:
        importlib.invalidate_caches()
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ModelError(
                f"There is no module {error.name}, asked for by --model {name}; it must be installed or lie in the "
                "current folder."
            ) from error
        raise ModelError(f"Importing {module_name} failed: it needs {error.name}, which is not installed.") from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"Importing {module_name}, asked for by --model {name}, raised {said(error)}.") from error
    owner = module_name
    for word in path.split("."):
        if not hasattr(found, word):
            known = [known for known in getattr(found, "__dict__", {}) if not known.startswith("_")]
            hint = f"; {nearest(word, known)}" if known else ""
            raise ModelError(f"{owner} has no {word}, asked for by --model {name}{hint}.")
        found, owner = getattr(found, word), f"{owner}.{word}"
    if isinstance(found, nn.Module) or not callable(found):
        raise ModelError(
            f"{name} is a {type(found).__name__}, where a function or class is expected that returns a fresh module."
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ModelError(f"{name} must be callable without arguments ({error}).") from error
    except ValueError:
        pass  # built in; calling it will tell
    return found
