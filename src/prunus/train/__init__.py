"""Training: the reference loop, its settings, checkpoints and progress."""

from prunus.train.loop import Result, Run, accuracy, fit, fit_dense
from prunus.train.progress import Progress
from prunus.train.settings import Settings

__all__ = ["Progress", "Result", "Run", "Settings", "accuracy", "fit", "fit_dense"]
