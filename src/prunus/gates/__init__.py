"""Gates: the random multipliers whose distribution a budget acts on."""

from prunus.gates.apply import Draw, DrawAndMultiply, GateInputs, Multiply, Sites, lay, never_recomputed
from prunus.gates.hard_concrete import Estimator, HardConcrete

__all__ = [
    "Draw",
    "DrawAndMultiply",
    "Estimator",
    "GateInputs",
    "HardConcrete",
    "Multiply",
    "Sites",
    "lay",
    "never_recomputed",
]
