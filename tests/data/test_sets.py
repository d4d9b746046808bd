import os
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from prunus.data import NAMES, Dataset, check, fetch, load, sets
from prunus.data.split import stratified
from prunus.errors import DataError


def small(**changes: object) -> Dataset:
    whole = Dataset(
        "mine",
        train_x=torch.arange(24.0).view(6, 4),
        train_y=torch.tensor([0, 1, 2, 0, 1, 2]),
        test_x=torch.zeros(3, 4),
        test_y=torch.tensor([0, 1, 2]),
        classes=3,
    )
    return replace(whole, **changes)


def test_digits_are_split_by_class_without_overlap() -> None:
    images, labels = load_digits(return_X_y=True)
    train, test = stratified(labels)
    assert sorted([*train, *test]) == list(range(1797))
    for digit in range(10):
        members = int((labels == digit).sum())
        assert int((labels[test] == digit).sum()) == round(0.2 * members)
    data = load("digits")
    assert torch.equal(data.test_x.flatten(1), torch.tensor(images[test] / 16, dtype=torch.float32))
    assert data.train_y.tolist() == labels[train].tolist()
    assert (float(data.train_x.min()), float(data.train_x.max())) == (0.0, 1.0)


def test_the_split_is_the_same_in_every_version() -> None:
    _, test = stratified(load_digits(return_X_y=True)[1])
    assert test[:8].tolist() == [3, 7, 13, 19, 36, 38, 43, 48]
    assert (len(test), int(test.sum())) == (359, 311827)


def test_digits_are_the_same_each_time() -> None:
    first, second = load("digits"), load("digits")
    assert torch.equal(first.train_x, second.train_x)
    assert torch.equal(first.test_y, second.test_y)


def test_a_data_set_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        load("digits").classes = 9


def test_images_are_scaled_and_normalised(given: Path, arrays: dict[str, np.ndarray]) -> None:
    data = load("mnist")
    mean, deviation = sets.NORMALISATION["mnist"]
    for part, name in (("train", "train-images-idx3-ubyte.gz"), ("test", "t10k-images-idx3-ubyte.gz")):
        x = getattr(data, f"{part}_x")
        assert x.shape == (*arrays[name].shape[:1], 1, 28, 28)
        torch.testing.assert_close(
            x[:, 0].double(), torch.tensor((arrays[name] / 255 - mean) / deviation), rtol=1e-5, atol=1e-6
        )
    assert data.train_y.tolist() == arrays["train-labels-idx1-ubyte.gz"].tolist()
    assert data.train_y.dtype == torch.int64
    assert data.classes == 10


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_real_sets_have_mean_0_and_deviation_1(name: str) -> None:
    root = os.environ.get("PRUNUS_DATA")
    if not root or not (Path(root) / name).is_dir():
        pytest.skip(f"PRUNUS_DATA names no folder with {name}/ in it")
    data = load(name)
    assert data.train_x.shape == (60000, 1, 28, 28)
    assert data.test_x.shape == (10000, 1, 28, 28)
    assert abs(float(data.train_x.mean())) < 1e-5
    assert abs(float(data.train_x.std()) - 1) < 1e-5
    assert data.test_y.bincount(minlength=10).min() >= 892
    check(data)


def test_a_shape_is_given_to_each_input() -> None:
    data = load("digits", shape=(64,))
    assert data.train_x.shape == (1438, 64)
    assert torch.equal(data.train_x, load("digits").train_x.flatten(1))


@pytest.mark.parametrize("shape", [(63,), (1, 9, 9), (-1,), (0, 64), ()])
def test_a_shape_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"digits: an input of 1x8x8 cannot be given the shape .* 64 values"):
        load("digits", shape=shape)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(DataError, match=r"'cifar'; there are: digits, mnist, fashion-mnist"):
        load("cifar")
    assert set(fetch.SOURCES) == set(NAMES) - {"digits"}


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_before_any_work(device: str) -> None:
    with pytest.raises(DataError, match=f"no device '{device}' here"):
        load("mnist", device=device)


def test_sound_data_pass() -> None:
    assert check(small()) is None
    assert check(small(), outputs=3) is None
    assert check(small(train_x=torch.ones(6, 4, dtype=torch.int64), test_x=torch.ones(3, 4, dtype=torch.int64))) is None
    assert check(small(test_y=torch.tensor([1, 1, 1]))) is None  # a test set of one class can be measured


def poisoned(value: float) -> torch.Tensor:
    x = torch.zeros(6, 4)
    x[2, 1] = x[5, 3] = value
    return x


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train_x": torch.zeros(0, 4)}, r"train_x is empty \(its shape is \(0, 4\)\)"),
        ({"test_y": torch.zeros(0, dtype=torch.int64)}, "test_y is empty"),
        ({"train_x": [[1.0]]}, "train_x is a list"),
        ({"train_x": torch.zeros(6)}, r"train_x has the shape \(6,\)"),
        ({"test_x": torch.zeros(3, 5)}, "one input of train_x is 4 but one of test_x is 5"),
        ({"train_x": torch.zeros(5, 4)}, "train_x holds 5 samples but train_y holds 6 labels"),
        ({"test_x": torch.zeros(4, 4)}, "test_x holds 4 samples but test_y holds 3 labels"),
        ({"train_x": poisoned(float("nan"))}, r"train_x holds 2 values of 24 .* first at index \(2, 1\)"),
        ({"train_x": poisoned(float("-inf"))}, r"train_x holds 2 values of 24 .* first at index \(2, 1\)"),
        ({"test_x": torch.full((3, 4), float("inf"))}, r"test_x holds 12 values of 12 .* first at index \(0, 0\)"),
        ({"train_x": torch.zeros(6, 4, dtype=torch.uint8)}, r"train_x holds uint8, .* x / 255"),
        ({"train_x": torch.zeros(6, 4, dtype=torch.complex64)}, "train_x holds complex64"),
        ({"train_y": torch.rand(6)}, "train_y holds float32, .* classification only"),
        ({"train_y": torch.eye(6, dtype=torch.int64)}, r"train_y has the shape \(6, 6\).*argmax"),
        ({"train_y": torch.tensor([0, 1, -1, 0, -2, 1])}, "train_y has the label -1 at index 2.*count from 0"),
        ({"train_y": torch.full((6,), -1)}, "train_y has the label -1 at index 0"),
        (
            {"train_y": torch.tensor([0, 1, 2, 3, 0, 4])},
            "train_y has the label 3 at index 3, .*3 classes .*allow 0 to 2",
        ),
        ({"test_y": torch.tensor([0, 1, 7])}, "test_y has the label 7 at index 2"),
        ({"train_y": torch.ones(6, dtype=torch.int64)}, r"train_y holds one class only \(every label is 1\)"),
    ],
)
def test_unfit_data_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(DataError, match=f"mine: {message}"):
        check(small(**changes))


def test_labels_beyond_the_models_outputs_are_refused() -> None:
    with pytest.raises(DataError, match="train_y has the label 2 at index 2, where the model's 2 outputs allow 0 to 1"):
        check(small(), outputs=2)
