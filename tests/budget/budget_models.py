"""Small gated models, and budgets read in slow plain Python."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import prunus
from prunus.axes import Keep
from prunus.gated import Gated
from prunus.measure import count_bytes, count_macs, count_params
from prunus.surgery import slice_model
from prunus.terms import Both, Cat, Leaf, Prod, Term


class LeNet(nn.Module):
    """LeNet-5 in small: 3-4-16-5."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 3)
        self.conv2 = nn.Conv2d(3, 4, 2)
        self.fc1 = nn.Linear(16, 5)
        self.fc2 = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = self.conv2(x).relu()
        return self.fc2(self.fc1(x.flatten(1)).relu())


class Residual(nn.Module):
    """A residual stream that stands on both sides of `mix`: its cost counts E[n^2]."""

    def __init__(self, width: int = 5, hidden: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.mix = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.down(self.up(x).relu())
        x = x + self.mix(x)
        return self.out(x)


class Branches(nn.Module):
    """Two convolutions side by side under the finer inputs of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 3, 3)
        self.fc, self.out = nn.Linear(5 * 4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.a(x), self.b(x)], 1).relu().flatten(1)
        return self.out(self.fc(x).relu())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


INPUTS: dict[str, Callable[[], Tensor]] = {
    "mlp": lambda: torch.randn(2, 6),
    "lenet": lambda: torch.randn(2, 1, 8, 8),
    "residual": lambda: torch.randn(2, 6),
    "branches": lambda: torch.randn(2, 1, 4, 4),
}
MAKE: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "lenet": LeNet, "residual": Residual, "branches": Branches}
NAMES = ("mlp", "lenet", "residual")


def small_gated(name: str, seed: int = 0, spread: float = 1.5, units: str = "structured") -> Gated:
    """A gated model whose gates stand anywhere."""
    torch.manual_seed(seed)
    gated = prunus.gate(MAKE[name](), INPUTS[name](), units=units)
    with torch.no_grad():
        gated.log_alpha.normal_(-1.0, spread).clamp_(gated.gates.low, gated.gates.high)
    return gated


def positions(term: Term, values: dict[str, list[float]]) -> list[list[tuple[str, int]]]:
    """For every position of a term the gates (group, unit) that act there, by recursion over lists."""
    if isinstance(term, Leaf):
        return [[] if term.group is None else [(term.group, k)] for k in range(term.size)]
    if isinstance(term, Both):
        return [a + b for a, b in zip(positions(term.base, values), positions(term.fine, values), strict=True)]
    if isinstance(term, Cat):
        return [one for segment in term.segments for one in positions(segment, values)]
    assert isinstance(term, Prod)
    every = [positions(factor, values) for factor in term.factors]
    return [list(itertools.chain(*chosen)) for chosen in itertools.product(*every)]


def slow_params(gated: Gated, values: dict[str, list[float]], only: str | None = None) -> float:
    """The expected number of parameters, entry by entry: every distinct gate that acts on it must be open."""
    total = 0.0
    for name, stored in gated.graph.tensors.items():
        if not stored.is_parameter or (only is not None and name.rpartition(".")[0] != only):
            continue
        along = [positions(term, values) for term in gated.graph.axes[name]]
        for entry in itertools.product(*along):
            probability = 1.0
            for group, unit in {gate for axis in entry for gate in axis}:
                probability *= values[group][unit]
            total += probability
    return total


def by_group(gated: Gated, flat: Tensor) -> dict[str, list[float]]:
    values, start = {}, 0
    for name, size in gated.graph.sizes.items():
        values[name] = flat[start : start + size].tolist()
        start += size
    return values


def counted(gated: Gated, keep: Keep, x: Tensor) -> dict[str, int]:
    """What is counted on the module after surgery."""
    small = slice_model(gated.model, gated.graph, keep.closed())
    return {"params": count_params(small), "macs": count_macs(small, (x,)), "bytes": count_bytes(small)}
