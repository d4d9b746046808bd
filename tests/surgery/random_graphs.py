"""Random graphs of maps, then of tokens: norms of every kind, splits, literals, attention written in several ways."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTS = [F.relu, torch.tanh, F.silu, F.gelu]
MAPS = [
    "conv", "conv", "grouped", "depthwise", "batch_norm", "group_norm", "layer_norm", "instance_norm", "act", "act",
    "add", "add", "cat", "chunk", "split", "cut", "shuffle", "pool", "excite", "pad", "enlarge", "weigh",
]  # fmt: skip
TOKENS = [
    "linear", "layer_norm", "rms_norm", "root_mean", "attend", "attend", "gated", "glu", "cat", "chunk", "act", "add",
]  # fmt: skip


class RandomGraph(nn.Module):
    """A random program over a growing list of results, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.draw = draw = random.Random(seed)
        self.layers = nn.ModuleDict()
        self.program: list[tuple[Any, ...]] = []
        self.shapes: list[tuple[int, int]] = [(3, 6)]  # channels and side of maps, or width and 0 of tokens
        self._conv(0)
        for _ in range(draw.randint(2, 6)):
            getattr(self, f"_{draw.choice(MAPS)}")(self._recent(1))
        self.first = len(self.shapes)
        last = self._recent(1)
        self._step("tokens", last, shape=(self.shapes[last][0], 0))
        if draw.random() < 0.7:
            self._linear(self.first)
        for _ in range(draw.randint(1, 4)):
            getattr(self, f"_{draw.choice(TOKENS)}")(self._recent(self.first))
        used = {k for step in self.program for k in (step[1], *(step[2:3] if step[0] in ("add", "cat") else ()))}
        self.ends = [k for k in range(1, len(self.shapes)) if k not in used or draw.random() < 0.15]
        self.heads = nn.ModuleList([nn.Linear(self.shapes[k][0], 2) for k in self.ends])

    def _recent(self, least: int) -> int:
        return self.draw.randrange(max(least, len(self.shapes) - 3), len(self.shapes))

    def _layer(self, layer: nn.Module) -> str:
        for name, value in layer.named_parameters():  # no two alike, norms as after training
            if value.dim() == 1:
                nn.init.uniform_(value, 0.5, 1.5) if name.endswith("weight") else nn.init.normal_(value, std=0.3)
        if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None:
            nn.init.normal_(layer.running_mean, std=0.3)
            nn.init.uniform_(layer.running_var, 0.5, 2)
        name = f"l{len(self.layers)}"
        self.layers[name] = layer
        return name

    def _step(self, kind: str, at: int, *rest: Any, shape: tuple[int, int]) -> None:
        self.program.append((kind, at, *rest))
        self.shapes.append(shape)

    def _module(self, at: int, layer: nn.Module, size: int | None = None) -> None:
        self._step("module", at, self._layer(layer), shape=(size or self.shapes[at][0], self.shapes[at][1]))

    # ---- maps --------------------------------------------------------------------------------------------------------

    def _conv(self, at: int, groups: int = 1, out: int | None = None) -> None:
        c, kernel = self.shapes[at][0], self.draw.choice([1, 3])
        out = out or groups * self.draw.choice([2, 3, 4, 6 if groups == 1 else 2])
        self._module(at, nn.Conv2d(c, out, kernel, 1, kernel // 2, 1, groups, self.draw.random() < 0.7), out)

    def _grouped(self, at: int) -> None:
        self._conv(at, self.draw.choice([d for d in range(1, 5) if self.shapes[at][0] % d == 0]))

    def _depthwise(self, at: int) -> None:
        c = self.shapes[at][0]
        self._conv(at, c, c * self.draw.choice([1, 1, 2]))

    def _batch_norm(self, at: int) -> None:
        self._module(at, nn.BatchNorm2d(self.shapes[at][0]))

    def _instance_norm(self, at: int) -> None:
        if self.shapes[at][1] > 1:
            self._module(at, nn.InstanceNorm2d(self.shapes[at][0], affine=True))

    def _group_norm(self, at: int) -> None:
        c = self.shapes[at][0]
        self._module(at, nn.GroupNorm(self.draw.choice([d for d in range(1, c + 1) if c % d == 0]), c))

    def _layer_norm(self, at: int) -> None:
        size, side = self.shapes[at]
        name = self._layer(nn.LayerNorm(size))
        self._step("norm of maps" if side else "module", at, name, shape=(size, side))

    def _act(self, at: int) -> None:
        self._step("act", at, self.draw.randrange(len(ACTS)), shape=self.shapes[at])

    def _like(self, at: int) -> list[int]:
        least = self.first if hasattr(self, "first") else 1
        return [k for k in range(least, len(self.shapes)) if self.shapes[k][1] == self.shapes[at][1]]

    def _add(self, at: int) -> None:
        size, side = self.shapes[at]
        others = [k for k in self._like(at) if k != at]
        fitting = [k for k in others if self.shapes[k][0] == size]
        if not fitting and others:
            other = self.draw.choice(others)
            c = self.shapes[other][0]
            self._module(other, nn.Conv2d(c, size, 1) if side else nn.Linear(c, size), size)
            fitting = [len(self.shapes) - 1]
        if fitting:
            self._step("add", at, self.draw.choice(fitting), shape=(size, side))

    def _cat(self, at: int) -> None:
        other = self.draw.choice(self._like(at))
        size = self.shapes[at][0] + self.shapes[other][0]
        if size <= 24:
            self._step("cat", at, other, shape=(size, self.shapes[at][1]))

    def _chunk(self, at: int) -> None:
        size, side = self.shapes[at]
        if size % 2 == 0 and size > 2:
            for part in (0, 1):
                self._step("chunk", at, part, shape=(size // 2, side))

    def _split(self, at: int) -> None:
        """At a number that the code holds."""
        size, side = self.shapes[at]
        if size > 2:
            first = self.draw.randrange(1, size)
            for part in (0, 1):
                self._step("split", at, first, size - first, part, shape=(size - first if part else first, side))

    def _cut(self, at: int) -> None:
        size, side = self.shapes[at]
        if size > 3:
            start = self.draw.randrange(size - 2)
            stop = self.draw.randrange(start + 2, size + 1)
            self._step("cut", at, start, stop, shape=(stop - start, side))

    def _shuffle(self, at: int) -> None:
        c, side = self.shapes[at]
        self._step("shuffle", at, self.draw.choice([d for d in range(1, c + 1) if c % d == 0]), c, shape=(c, side))

    def _pool(self, at: int) -> None:
        c, side = self.shapes[at]
        if side > 2:
            self._step("pool", at, shape=(c, side // 2))

    def _excite(self, at: int) -> None:
        c = self.shapes[at][0]
        self._step("excite", at, self._layer(nn.Linear(c, 3)), self._layer(nn.Linear(3, c)), shape=self.shapes[at])

    def _pad(self, at: int) -> None:
        """Maps of zeros beside."""
        c, side = self.shapes[at]
        before, after = self.draw.randrange(3), self.draw.randrange(3)
        self._step("pad", at, before, after, shape=(c + before + after, side))

    def _enlarge(self, at: int) -> None:
        c, side = self.shapes[at]
        if c % 4 == 0 and side <= 6:
            self._step("enlarge", at, shape=(c // 4, 2 * side))

    def _weigh(self, at: int) -> None:
        """Times the mean over the maps: dead ones must be zero."""
        self._step("weigh", at, shape=self.shapes[at])

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def _linear(self, at: int) -> None:
        size = self.draw.choice([4, 6, 8])
        self._module(at, nn.Linear(self.shapes[at][0], size, self.draw.random() < 0.7), size)

    def _rms_norm(self, at: int) -> None:
        self._module(at, nn.RMSNorm(self.shapes[at][0], eps=1e-5))

    def _root_mean(self, at: int) -> None:
        """A root-mean-square norm written out, as many are."""
        name = self._layer(nn.RMSNorm(self.shapes[at][0], eps=1e-5))
        self._step("root_mean", at, name, shape=self.shapes[at])

    def _attend(self, at: int) -> None:
        width, (heads, each) = self.shapes[at][0], self.draw.choice([(2, 3), (3, 2), (2, 4), (4, 2)])
        fused = self.draw.choice(["five dimensions", "chunks", "separate"])
        way = self.draw.choice(["one operation", "products", "by name"])
        if fused == "separate":
            layers = [nn.Linear(width, heads * each, self.draw.random() < 0.7) for _ in range(3)]
        else:
            layers = [nn.Linear(width, 3 * heads * each)]
        names = [self._layer(layer) for layer in [*layers, nn.Linear(heads * each, width)]]
        self._step("attend", at, names, (heads, each), fused, way, shape=(width, 0))

    def _gated(self, at: int) -> None:
        width, hidden = self.shapes[at][0], self.draw.choice([3, 5])
        names = [self._layer(nn.Linear(width, 2 * hidden)), self._layer(nn.Linear(hidden, width))]
        self._step("gated", at, names, hidden, shape=(width, 0))

    def _glu(self, at: int) -> None:
        size = self.shapes[at][0]
        if size % 2 == 0:
            self._step("glu", at, shape=(size // 2, 0))

    # ---- what is computed --------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> list[Tensor]:
        results = [x]
        for kind, at, *rest in self.program:
            results.append(self._computed(kind, results[at], results, rest))
        ends = [results[k] for k in self.ends]
        pooled = [F.adaptive_max_pool2d(x, 1).flatten(1) if x.dim() == 4 else x.mean(1) for x in ends]
        return [head(x) for head, x in zip(self.heads, pooled, strict=True)]

    def _computed(self, kind: str, x: Tensor, results: list[Tensor], rest: list[Any]) -> Tensor:
        along = 1 if x.dim() == 4 else -1
        if kind == "module":
            return self.layers[rest[0]](x)
        if kind == "norm of maps":
            return self.layers[rest[0]](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if kind == "act":
            return ACTS[rest[0]](x)
        if kind == "add":
            return x + results[rest[0]]
        if kind == "cat":
            return torch.cat([x, results[rest[0]]], along)
        if kind == "chunk":
            return x.chunk(2, along)[rest[0]]
        if kind == "split":
            return x.split(rest[:2], along)[rest[2]]
        if kind == "cut":
            return x[:, rest[0] : rest[1]]
        if kind == "shuffle":
            b, _, h, w = x.shape
            return x.view(b, rest[0], rest[1] // rest[0], h, w).transpose(1, 2).reshape(b, rest[1], h, w)
        if kind == "pool":
            return F.avg_pool2d(x, 2)
        if kind == "excite":
            scale = self.layers[rest[1]](F.relu(self.layers[rest[0]](x.mean((2, 3)))))
            return x * torch.sigmoid(scale)[:, :, None, None]
        if kind == "pad":
            return F.pad(x, (0, 0, 0, 0, rest[0], rest[1]))
        if kind == "enlarge":
            return F.pixel_shuffle(x, 2)
        if kind == "weigh":
            return x * x.mean(1, keepdim=True)
        if kind == "tokens":
            return x.flatten(2).transpose(1, 2)
        if kind == "root_mean":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.layers[rest[0]].weight
        if kind == "glu":
            return F.glu(x, -1)
        if kind == "gated":
            value, gate = self.layers[rest[0][0]](x).split(rest[1], -1)
            return x + self.layers[rest[0][1]](value * F.silu(gate))
        return x + self._attended(x, *rest)

    def _attended(self, x: Tensor, names: list[str], sizes: tuple[int, int], fused: str, way: str) -> Tensor:
        (b, n, _), (heads, each) = x.shape, sizes
        if fused == "five dimensions":
            q, k, v = self.layers[names[0]](x).reshape(b, n, 3, heads, each).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            made = [self.layers[name](x) for name in names[:-1]]
            parts = made[0].chunk(3, -1) if fused == "chunks" else made
            q, k, v = (part.view(b, n, heads, each).transpose(1, 2) for part in parts)
        if way == "one operation":
            read = F.scaled_dot_product_attention(q, k, v)
        elif way == "products":
            read = (q @ k.transpose(-2, -1) * each**-0.5).softmax(-1) @ v
        else:
            weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
            read = torch.einsum("bhij,bhjd->bhid", weights, v)
        return self.layers[names[-1]](read.transpose(1, 2).reshape(b, n, heads * each))
