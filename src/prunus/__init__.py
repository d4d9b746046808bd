"""Prunus trains neural networks to a budget and hands back a plain, smaller, provably equal model.

>>> import torch
>>> from torch import nn
>>> import prunus
>>> _ = torch.manual_seed(0)
>>> model, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)), torch.randn(64, 8)
>>> gated = prunus.gate(model, x)
>>> budget = prunus.Budget(gated, params=0.5, dual_rate=0.02)
>>> optimizer = torch.optim.Adam(gated.parameters(), lr=0.02)
>>> for step in range(300):
...     budget.tighten(step / 240)
...     loss = nn.functional.mse_loss(gated(x), x[:, :2]) + budget.pressure()
...     optimizer.zero_grad()
...     loss.backward()
...     optimizer.step()
...     budget.step()
>>> small, receipt = prunus.shrink(gated, x)
>>> receipt["deployed"]["params"] <= 0.5 * receipt["dense"]["params"]
True
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunus.axes import Graph, Keep
    from prunus.budget import Budget
    from prunus.errors import PrunusError
    from prunus.extrapolation import ExtrapolationFromThePast
    from prunus.front import gate, shrink
    from prunus.gated import Gated
    from prunus.gates import HardConcrete
    from prunus.landing import Landing, land
    from prunus.methods import Penalty
    from prunus.receipt import Receipt
    from prunus.surgery.artefact import load, save

__version__ = "0.1.0"
__all__ = [
    "Budget",
    "ExtrapolationFromThePast",
    "Gated",
    "Graph",
    "HardConcrete",
    "Keep",
    "Landing",
    "Penalty",
    "PrunusError",
    "Receipt",
    "gate",
    "land",
    "load",
    "save",
    "shrink",
]

# Looked up when they are asked for: the command line's help need not wait for torch.
_WHERE = {
    "Budget": "prunus.budget",
    "ExtrapolationFromThePast": "prunus.extrapolation",
    "Gated": "prunus.gated",
    "Graph": "prunus.axes",
    "HardConcrete": "prunus.gates",
    "Keep": "prunus.axes",
    "Landing": "prunus.landing",
    "Penalty": "prunus.methods",
    "PrunusError": "prunus.errors",
    "Receipt": "prunus.receipt",
    "gate": "prunus.front",
    "land": "prunus.landing",
    "load": "prunus.surgery.artefact",
    "save": "prunus.surgery.artefact",
    "shrink": "prunus.front",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'prunus' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_WHERE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
