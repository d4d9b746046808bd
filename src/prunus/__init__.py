"""Prunus trains neural networks to a budget and hands back a plain, smaller, provably equal model.

>>> import torch
>>> from torch import nn
>>> import prunus
>>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
>>> x = torch.randn(4, 8)
>>> gated = prunus.gate(model, x)
>>> budget = prunus.Budget(gated, params=0.5)
>>> small, receipt = prunus.shrink(gated, x)  # untrained gates: the landing closes all that is missing
>>> receipt["deployed"]["params"] <= 0.5 * receipt["dense"]["params"]
True
"""

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
