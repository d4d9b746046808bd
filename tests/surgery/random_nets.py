"""Random architectures: convolutions of every kind, norms, sums, concatenations, pools, and linear layers behind."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS = [F.relu, torch.sigmoid, torch.tanh, F.gelu, F.leaky_relu, lambda x: F.relu(x, inplace=False), F.silu]
KINDS = [
    "conv", "conv", "grouped", "depthwise", "norm", "norm", "act", "act", "add", "cat", "pool", "transposed", "excite",
    "prelu",
]  # fmt: skip


class RandomNet(nn.Module):
    """A random program over a growing list of feature maps, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.draw = draw = random.Random(seed)
        self.layers = nn.ModuleDict()
        self.program: list[tuple[Any, ...]] = []
        self.channels, self.side = [2], [8]
        self._conv(0, groups=1)
        for _ in range(draw.randint(3, 8)):
            kind = draw.choice(KINDS)
            at = draw.randrange(max(1, len(self.channels) - 3), len(self.channels))
            getattr(self, f"_{kind}")(at)
        self._heads()

    def _add_layer(self, layer: nn.Module) -> str:
        name = f"l{len(self.layers)}"
        self.layers[name] = layer
        return name

    def _append(self, step: tuple[Any, ...], channels: int, side: int) -> None:
        self.program.append(step)
        self.channels.append(channels)
        self.side.append(side)

    def _conv(self, at: int, groups: int = 1, out: int | None = None) -> None:
        draw, c, side = self.draw, self.channels[at], self.side[at]
        kernel = draw.choice([1, 2, 3])
        dilation = draw.choice([1, 1, 2])
        stride = draw.choice([1, 1, 2])
        padding = draw.choice([0, 1, 2])
        extent = side + 2 * padding - dilation * (kernel - 1)
        if extent < 2:
            kernel, padding, dilation, stride, extent = 1, 0, 1, 1, side
        out = out or groups * draw.randint(2, 5)
        layer = nn.Conv2d(c, out, kernel, stride, padding, dilation, groups, bias=draw.random() < 0.6)
        self._append(("module", at, self._add_layer(layer)), out, (extent - 1) // stride + 1)

    def _grouped(self, at: int) -> None:
        divisors = [d for d in range(2, self.channels[at]) if self.channels[at] % d == 0]
        self._conv(at, groups=self.draw.choice(divisors) if divisors else 1)

    def _depthwise(self, at: int) -> None:
        c = self.channels[at]
        self._conv(at, groups=c, out=c * self.draw.choice([1, 1, 2]))

    def _transposed(self, at: int) -> None:
        c, side = self.channels[at], self.side[at]
        if side > 8:
            return
        groups = self.draw.choice([d for d in range(1, c + 1) if c % d == 0])
        made, kernel, stride = self.draw.randint(1, 3), self.draw.choice([1, 2, 3]), self.draw.choice([1, 2])
        layer = nn.ConvTranspose2d(c, groups * made, kernel, stride, groups=groups, bias=self.draw.random() < 0.6)
        self._append(("module", at, self._add_layer(layer)), groups * made, (side - 1) * stride + kernel)

    def _norm(self, at: int) -> None:
        norm = nn.BatchNorm2d(self.channels[at], affine=self.draw.random() < 0.8)
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        if norm.affine:
            nn.init.normal_(norm.bias)
            nn.init.uniform_(norm.weight, 0.5, 2)
        self._append(("module", at, self._add_layer(norm)), self.channels[at], self.side[at])

    def _prelu(self, at: int) -> None:
        layer = nn.PReLU(self.draw.choice([1, self.channels[at]]))
        nn.init.normal_(layer.weight)
        self._append(("module", at, self._add_layer(layer)), self.channels[at], self.side[at])

    def _act(self, at: int) -> None:
        self._append(("act", at, self.draw.randrange(len(ACTIVATIONS))), self.channels[at], self.side[at])

    def _pool(self, at: int) -> None:
        side = self.side[at]
        kind = self.draw.choice(["max", "avg", "adaptive"])
        if side < 2:
            return
        self._append((kind, at), self.channels[at], 2 if kind == "adaptive" else side // 2)

    def _add(self, at: int) -> None:
        same = [k for k in range(1, len(self.side)) if self.side[k] == self.side[at] and k != at]
        fitting = [k for k in same if self.channels[k] == self.channels[at]]
        if not fitting:
            if not same:
                return
            other = self.draw.choice(same)
            layer = nn.Conv2d(self.channels[other], self.channels[at], 1)
            self._append(("module", other, self._add_layer(layer)), self.channels[at], self.side[at])
            fitting = [len(self.channels) - 1]
        self._append(("add", at, self.draw.choice(fitting)), self.channels[at], self.side[at])

    def _cat(self, at: int) -> None:
        fitting = [k for k in range(1, len(self.side)) if self.side[k] == self.side[at]]
        other = self.draw.choice(fitting)
        if self.channels[at] + self.channels[other] < 40:
            self._append(("cat", at, other), self.channels[at] + self.channels[other], self.side[at])

    def _excite(self, at: int) -> None:
        c = self.channels[at]
        down, up = self._add_layer(nn.Linear(c, 3)), self._add_layer(nn.Linear(3, c))
        self._append(("excite", at, down, up), c, self.side[at])

    def _heads(self) -> None:
        last = len(self.channels) - 1
        features = self.channels[last] * self.side[last] ** 2
        self.fc1 = nn.Linear(features, 5)
        self.fc2 = nn.Linear(5, 3)
        self.tap = self.draw.randrange(1, last + 1)
        self.head = nn.Linear(self.channels[self.tap], 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = [x]
        for kind, at, *rest in self.program:
            x = maps[at]
            if kind == "module":
                x = self.layers[rest[0]](x)
            elif kind == "act":
                x = ACTIVATIONS[rest[0]](x)
            elif kind == "add":
                x = x + maps[rest[0]]
            elif kind == "cat":
                x = torch.cat([x, maps[rest[0]]], 1)
            elif kind == "excite":
                scale = self.layers[rest[1]](F.relu(self.layers[rest[0]](x.mean((2, 3)))))
                x = x * torch.sigmoid(scale)[:, :, None, None]
            elif kind == "max":
                x = F.max_pool2d(x, 2)
            elif kind == "avg":
                x = F.avg_pool2d(x, 2)
            else:
                x = F.adaptive_avg_pool2d(x, 2)
            maps.append(x)
        features = torch.flatten(maps[-1], 1)
        return self.fc2(F.relu(self.fc1(features))), self.head(F.adaptive_max_pool2d(maps[self.tap], 1).flatten(1))
