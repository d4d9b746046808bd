"""The papers' networks, and nothing more: bring your own."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """784-300-100-10 for MNIST in seeds 001 and 004; the input and output sizes follow the data.

    >>> sum(p.numel() for p in MLP().parameters())
    266610
    """

    def __init__(self, inputs: int = 784, hidden: Sequence[int] = (300, 100), classes: int = 10) -> None:
        super().__init__()
        sizes = [inputs, *hidden]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = nn.Linear(sizes[-1], classes)
        _papers_initialisation(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = x.flatten(1)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.out(x)


class LeNet5(nn.Module):
    """LeNet-5-Caffe, 20-50-800-500, for images of 28 x 28.

    >>> sum(p.numel() for p in LeNet5().parameters())
    431080
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(800, 500)
        self.fc2 = nn.Linear(500, classes)
        _papers_initialisation(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def _papers_initialisation(model: nn.Module) -> None:
    """Kaiming normal, fan_out for convolutions and fan_in for linear layers, zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_out" if isinstance(module, nn.Conv2d) else "fan_in")
            assert module.bias is not None
            nn.init.zeros_(module.bias)
