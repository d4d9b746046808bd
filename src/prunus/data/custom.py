"""A user's own data: import the function that "package.module:function" names, call it, gather what it returns."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunus.errors import DataError, nearest

WANTED = (
    "four tensors (train_x, train_y, test_x, test_y), or a pair (train, test) of DataLoaders or torch Datasets "
    "of (x, y)"
)
# An endless loader would otherwise fill the memory before anything is said.
MOST_BYTES = 64 << 30
_GATHER = 1024


def tensors(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Call the function that `name` names and give (train_x, train_y, test_x, test_y), not yet checked.

    Raises:
        DataError: It cannot be imported or called, or returned something else.
    """
    with _importable():
        function = _find(name)
        try:
            made = function()
        except DataError:
            raise
        except (Exception, SystemExit) as error:
            raise DataError(f"Calling {name}() raised {_said(error)}; it must return {WANTED}.") from error
        parts = tuple(made) if isinstance(made, tuple | list) else (made,)
        if len(parts) == 2 and not any(_is_array(part) for part in parts):
            parts = (*_gather(parts[0], "train", name), *_gather(parts[1], "test", name))
        elif len(parts) != 4:
            raise DataError(f"{name}() returned {_describe(made)}, where {WANTED} are expected.")
    labels = ("train_x", "train_y", "test_x", "test_y")
    train_x, train_y, test_x, test_y = (
        _tensor(part, f"{label} of {name}()") for part, label in zip(parts, labels, strict=True)
    )
    return _narrow(train_x), _widen(train_y), _narrow(test_x), _widen(test_y)


@contextmanager
def _importable() -> Iterator[None]:
    """Put the current folder on sys.path, as `python -m` does and an installed command does not."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _find(name: str) -> Callable[[], Any]:
    module_name, _, path = name.partition(":")
    if not module_name or not path or not all(word.isidentifier() for word in f"{module_name}.{path}".split(".")):
        raise DataError(f'{name!r} names no function; write "package.module:function", such as "mydata:loaders".')
    try:
        importlib.invalidate_caches()
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise DataError(
                f"There is no module {error.name}, asked for by {name!r}; it must be installed or lie in the current "
                f"folder, {os.getcwd()}."
            ) from error
        raise DataError(f"Importing {module_name} failed: it needs {error.name}, which is not installed.") from error
    except (Exception, SystemExit) as error:
        raise DataError(f"Importing {module_name}, asked for by {name!r}, raised {_said(error)}.") from error
    owner = module_name
    for word in path.split("."):
        if not hasattr(found, word):
            known = [known for known in vars(found) if not known.startswith("_")] if hasattr(found, "__dict__") else []
            hint = f"; {nearest(word, known)}" if known else ""
            raise DataError(f"{owner} has no {word}, asked for by {name!r}{hint}.")
        found, owner = getattr(found, word), f"{owner}.{word}"
    if not callable(found):
        raise DataError(f"{name!r} names a {type(found).__name__}, where a function that returns {WANTED} is expected.")
    _check_signature(found, name)
    return found


def _check_signature(function: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # built in; calling it will tell
    try:
        signature.bind()
    except TypeError as error:
        raise DataError(f"{name} must be callable without arguments, but its are {signature} ({error}).") from error


def _gather(source: Any, part: str, name: str) -> tuple[Tensor, Tensor]:
    """Read a loader or a Dataset to its end."""
    where = f"the {part} part of {name}()"
    batches = source
    if isinstance(source, torch.utils.data.Dataset):
        if not (hasattr(source, "__len__") or isinstance(source, torch.utils.data.IterableDataset)):
            raise DataError(f"{where} is a Dataset without a length; give it __len__, or wrap it in a DataLoader.")
        batches = torch.utils.data.DataLoader(source, batch_size=_GATHER)
    if not isinstance(batches, Iterable) or isinstance(batches, str | bytes | dict):
        raise DataError(f"{where} is {_describe(source)}, where a DataLoader or a torch Dataset of (x, y) is expected.")
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    held = 0
    try:
        for number, batch in enumerate(batches):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                what = "the samples" if batches is not source else f"batch {number}"
                raise DataError(f"{where}: {what} came as {_describe(batch)}, where a pair (x, y) is expected.")
            x, y = (_tensor(half, f"{half_name} of {where}") for half, half_name in zip(batch, "xy", strict=True))
            if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
                raise DataError(
                    f"{where}: batch {number} has x of shape {tuple(x.shape)} and y of shape {tuple(y.shape)}, where "
                    "both must begin with the same number of samples."
                )
            xs.append(x)
            ys.append(y)
            held += x.nbytes + y.nbytes
            if held > MOST_BYTES:
                raise DataError(f"{where} gave {held >> 30} GiB without ending; Prunus holds data in memory.")
        if not xs:
            raise DataError(f"{where} is empty: it gave no batch; it must hold samples.")
        return torch.cat(xs), torch.cat(ys)
    except DataError:
        raise
    except Exception as error:
        hint = "; a transform such as ToTensor makes images into tensors" if "PIL" in str(error) else ""
        raise DataError(f"Reading {where} raised {_said(error)}{hint}.") from error


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to_dense().cpu()
    try:
        array = np.ascontiguousarray(value)
        # Of an array that cannot be written torch takes a copy only with a warning.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(f"{what} is {_describe(value)}, which is no tensor or array of numbers ({error}).") from error


def _narrow(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.is_floating_point() else x


def _widen(y: Tensor) -> Tensor:
    return y if y.is_floating_point() or y.is_complex() else y.to(torch.int64)


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        kinds = ", ".join(type(part).__name__ for part in value[:6]) + (", ..." if len(value) > 6 else "")
        return f"a {type(value).__name__} of {len(value)} ({kinds})"
    return f"a {type(value).__name__}" if value is not None else "None"


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
