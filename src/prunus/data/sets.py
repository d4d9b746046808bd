"""Data sets as tensors: scikit-learn's digits, MNIST, Fashion-MNIST, and what a user's own function returns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prunus.data import custom, fetch
from prunus.data.split import stratified
from prunus.errors import DataError, nearest

NAMES = ("digits", "mnist", "fashion-mnist")

# Mean and standard deviation of all pixels of the training images, divided by 255; from exact sums over the counts of
# the 256 values, so that they do not depend on an order of summation.
NORMALISATION = {
    "mnist": (0.13066047627384286, 0.3081078038564627),
    "fashion-mnist": (0.2860405969887955, 0.3530242445149226),
}


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification task, held whole in memory; the first dimension of each tensor counts the samples.

    >>> data = load("digits")
    >>> data.train_x.shape, data.train_x.dtype, data.train_y.dtype, len(data.test_y), data.classes
    (torch.Size([1438, 1, 8, 8]), torch.float32, torch.int64, 359, 10)
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int

    def to(self, device: torch.device | str) -> "Dataset":
        """Give the same data set with its tensors on `device`."""
        parts = {part: getattr(self, part).to(device) for part in ("train_x", "train_y", "test_x", "test_y")}
        return replace(self, **parts)


def load(name: str, device: torch.device | str = "cpu", shape: Sequence[int] | None = None) -> Dataset:
    """Load a data set by name, or from the user's function named as "package.module:function".

    - `digits`: scikit-learn's 1797 images of 8x8, values from 0 to 1; 80% of each class trains, always the same.
    - `mnist`, `fashion-mnist`: (N, 1, 28, 28), scaled to 0 to 1, then normalised by `NORMALISATION`.
    - "package.module:function": called without arguments, with the current folder importable; it returns four tensors
      or arrays (train_x, train_y, test_x, test_y), or a pair (train, test) of iterables over batches (x, y), such as
      DataLoaders, or of torch Datasets over samples (x, y). They are read once, so random augmentation is frozen.
      Floating inputs become float32, integer inputs (token ids) are kept.

    Args:
        name: One of `NAMES`, or "package.module:function".
        device: Where the tensors are put.
        shape: The shape of one input, if it is to be another of as many values, such as (784,).

    Raises:
        DataError: There is no such data, or it is damaged or unfit; the message says what was wrong.

    >>> load("digits", shape=(64,)).test_x.shape
    torch.Size([359, 64])
    >>> load("mnits")
    Traceback (most recent call last):
    ...
    prunus.errors.DataError: There is no data set named 'mnits'; nearest: mnist. Your own is named as "pkg.mod:loaders".
    """
    _reachable(device)  # before a minute of downloading, not after
    if name == "digits":
        data = _digits()
    elif name in NORMALISATION:
        data = _images(name)
    elif ":" in name:
        train_x, train_y, test_x, test_y = custom.tensors(name)
        data = Dataset(name, train_x, train_y, test_x, test_y, classes=_classes(train_y))
        check(data)
    else:
        raise DataError(
            f'There is no data set named {name!r}; {nearest(name, NAMES)}. Your own is named as "pkg.mod:loaders".'
        )
    if shape is not None:
        data = replace(data, train_x=_shaped(data.train_x, shape, name), test_x=_shaped(data.test_x, shape, name))
    try:
        return data.to(device)
    except RuntimeError as error:
        raise DataError(f"The data set {name} cannot be put on the device {device}: {_first_line(error)}.") from error


def check(dataset: Dataset, outputs: int | None = None) -> None:
    """Refuse data that no classifier can learn from.

    Args:
        dataset: What to look at.
        outputs: If given, how many classes the model tells apart; no label may lie beyond.

    Raises:
        DataError: One sentence with the tensor's name, what is wrong with it, and where that begins.

    >>> check(load("digits"))
    >>> check(load("digits"), outputs=9)
    Traceback (most recent call last):
    ...
    prunus.errors.DataError: digits: train_y has the label 9 at index 7, where the model's 9 outputs allow 0 to 8.
    """
    for part in ("train", "test"):
        x, y = getattr(dataset, f"{part}_x"), getattr(dataset, f"{part}_y")
        _check_kinds(dataset.name, part, x, y)
        _check_finite(dataset.name, part, x)
    if dataset.train_x.shape[1:] != dataset.test_x.shape[1:]:
        raise DataError(
            f"{dataset.name}: one input of train_x is {_by(dataset.train_x)} but one of test_x is "
            f"{_by(dataset.test_x)}; they must be equal."
        )
    if int(dataset.train_y.min()) == int(dataset.train_y.max()) and int(dataset.train_y.min()) >= 0:
        raise DataError(
            f"{dataset.name}: train_y holds one class only (every label is {int(dataset.train_y[0])}); there is "
            "nothing to tell apart, at least two are needed."
        )
    for part in ("train_y", "test_y"):
        _check_range(dataset, part, outputs)


def _check_kinds(name: str, part: str, x: Tensor, y: Tensor) -> None:
    for what, tensor in ((f"{part}_x", x), (f"{part}_y", y)):
        if not isinstance(tensor, Tensor):
            raise DataError(f"{name}: {what} is a {type(tensor).__name__}, where a tensor is needed.")
        if tensor.numel() == 0:
            raise DataError(f"{name}: {what} is empty (its shape is {tuple(tensor.shape)}); it must hold samples.")
    if x.ndim < 2:
        raise DataError(
            f"{name}: {part}_x has the shape {tuple(x.shape)}, where the samples come first and at least one more "
            "dimension follows."
        )
    if x.dtype in (torch.uint8, torch.bool) or x.is_complex():
        raise DataError(f"{name}: {part}_x holds {_kind(x)}, where floats are needed; images are scaled by x / 255.0.")
    if y.is_floating_point() or y.is_complex():
        raise DataError(
            f"{name}: {part}_y holds {_kind(y)}, where Prunus, which does classification only, needs whole numbers from"
            " 0 as labels; if they are class numbers, convert them to int64, and real-valued targets are not possible."
        )
    if y.ndim != 1:
        raise DataError(
            f"{name}: {part}_y has the shape {tuple(y.shape)}, where one whole number per sample, so ({len(y)},), is "
            "needed; one-hot labels become that by argmax(1), a last dimension of 1 goes by squeeze(1)."
        )
    if len(x) != len(y):
        raise DataError(f"{name}: {part}_x holds {len(x)} samples but {part}_y holds {len(y)} labels; they must agree.")


def _check_finite(name: str, part: str, x: Tensor) -> None:
    if not x.is_floating_point():
        return
    bad = ~torch.isfinite(x)
    count = int(bad.sum())
    if count:
        flat = int(bad.flatten().to(torch.uint8).argmax())
        first = tuple(int(i) for i in np.unravel_index(flat, x.shape))
        raise DataError(
            f"{name}: {part}_x holds {count} values of {x.numel()} that are NaN or infinite, the first at index "
            f"{first}; every input must be a finite number."
        )


def _check_range(dataset: Dataset, part: str, outputs: int | None) -> None:
    labels = getattr(dataset, part)
    limit, why = dataset.classes, f"the {dataset.classes} classes of {dataset.name}"
    if outputs is not None and outputs < limit:
        limit, why = outputs, f"the model's {outputs} outputs"
    bad = ((labels < 0) | (labels >= limit)).nonzero()
    if len(bad):
        index = int(bad[0])
        hint = "; labels count from 0" if int(labels[index]) < 0 else ""
        raise DataError(
            f"{dataset.name}: {part} has the label {int(labels[index])} at index {index}, where {why} allow 0 to "
            f"{limit - 1}{hint}."
        )


def _digits() -> Dataset:
    from sklearn.datasets import load_digits  # here and not above: importing it takes a second

    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).to(torch.float32).div_(16).view(-1, 1, 8, 8)
    y = torch.from_numpy(labels).to(torch.int64)
    train, test = (torch.from_numpy(part) for part in stratified(labels))
    return Dataset("digits", x[train], y[train], x[test], y[test], classes=10)


def _images(name: str) -> Dataset:
    mean, deviation = NORMALISATION[name]
    train_x, train_y, test_x, test_y = (torch.from_numpy(array) for array in fetch.arrays(name))
    # On the CPU whatever the device, so that every device trains on the same bits.
    inputs = (x.to(torch.float32).div_(255).sub_(mean).div_(deviation).unsqueeze(1) for x in (train_x, test_x))
    return Dataset(name, next(inputs), train_y.long(), next(inputs), test_y.long(), classes=10)


def _classes(labels: Tensor) -> int:
    """Count the classes as the greatest label says; 1 for labels that `check` refuses with better words."""
    whole = (
        isinstance(labels, Tensor) and labels.numel() > 0 and not (labels.is_floating_point() or labels.is_complex())
    )
    return max(1, int(labels.max()) + 1) if whole else 1


def _shaped(x: Tensor, shape: Sequence[int], name: str) -> Tensor:
    if math.prod(shape) != math.prod(x.shape[1:]) or any(size < 1 for size in shape):
        raise DataError(
            f"{name}: an input of {_by(x)} cannot be given the shape {tuple(shape)}; that takes "
            f"{math.prod(x.shape[1:])} values, all sizes written out."
        )
    return x.reshape(len(x), *shape)


def _reachable(device: torch.device | str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        raise DataError(f"There is no device {str(device)!r} here to put data on: {_first_line(error)}.") from error


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0].rstrip(".")


def _by(x: Tensor) -> str:
    return "x".join(map(str, x.shape[1:]))


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
