"""Gates: the random multipliers whose distribution a budget acts on."""

from prunus.gates.apply import Draw, GateInputs, Multiply, lay
from prunus.gates.hard_concrete import Estimator, HardConcrete

__all__ = ["Draw", "Estimator", "GateInputs", "HardConcrete", "Multiply", "lay"]
