"""Accuracy against numpy, and the modes it must leave as they were."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from train_toys import Net, toy_data

from prunus.train import accuracy


class Counting(nn.Module):
    """Gives its inputs as scores, and remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.modes.append((self.training, torch.is_grad_enabled()))
        return x


def scores(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 4, generator=generator)
    return x, torch.randint(0, 4, (count,), generator=generator)


@pytest.mark.parametrize("count, batch, sizes", [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 7, [3]), (1, 1, [1]),
                                                 (1025, 1024, [1024, 1])])  # fmt: skip
def test_it_equals_numpy_whatever_the_batch(count: int, batch: int, sizes: list[int]) -> None:
    x, y = scores(count)
    network = Counting()
    found = accuracy(network, x, y, batch)
    assert found == np.mean(x.numpy().argmax(1) == y.numpy())
    by_hand = sum(
        max(range(4), key=row.__getitem__) == label for row, label in zip(x.tolist(), y.tolist(), strict=True)
    )
    assert found == by_hand / count
    assert network.sizes == sizes


def test_all_right_and_all_wrong() -> None:
    y = torch.arange(9) % 3
    right = torch.eye(3)[y]
    assert accuracy(Counting(), right, y, 4) == 1.0
    assert accuracy(Counting(), right.roll(1, 1), y, 4) == 0.0


def test_it_evaluates_without_gradients() -> None:
    network = Counting()
    accuracy(network.train(), *scores(5), 2)
    assert set(network.modes) == {(False, False)}


@pytest.mark.parametrize("fails", [False, True])
def test_every_modules_own_mode_comes_back(fails: bool) -> None:
    data, network = toy_data(), Net()
    network.train()
    network.norm.eval()  # frozen by its user
    before = {name: module.training for name, module in network.named_modules()}
    statistics = network.norm.running_mean.clone()
    if fails:
        with pytest.raises(RuntimeError):
            accuracy(network, data.test_x[:, :3], data.test_y)
    else:
        accuracy(network, data.test_x, data.test_y)
    assert {name: module.training for name, module in network.named_modules()} == before
    assert torch.equal(network.norm.running_mean, statistics)


def test_it_draws_no_random_numbers() -> None:
    data, network, before = toy_data(), Net(), torch.get_rng_state()
    assert accuracy(network, data.test_x, data.test_y) == accuracy(network, data.test_x, data.test_y, 7)
    assert torch.equal(torch.get_rng_state(), before)
