"""Gates: the random multipliers whose distribution a budget acts on."""

from prunus.gates.hard_concrete import Estimator, HardConcrete

__all__ = ["Estimator", "HardConcrete"]
