"""Training: the reference loop, its settings, checkpoints and progress."""

from prunus.train.fit import Result, fit, fit_dense
from prunus.train.loop import Run, one_process
from prunus.train.metric import accuracy
from prunus.train.progress import Progress
from prunus.train.settings import Settings

__all__ = ["Progress", "Result", "Run", "Settings", "accuracy", "fit", "fit_dense", "one_process"]
