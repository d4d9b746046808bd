"""The settings of a run, and the rates they lead to."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from prunus.errors import PrunusError

METHODS = ("l0",)
SCHEDULES = ("constant", "cosine")
MOST_EPOCHS = 1_000_000
GREATEST = 1e38


@dataclass(frozen=True)
class Settings:
    """How a run trains.

    Args:
        epochs: all epochs, the polish included.
        batch_size: examples a step (and process).
        seed: of initial weights, gates, order and noise.
        method: constrained L0.
        weight_lr: Adam's rate of the weights.
        gate_lr: Adam's rate of log alpha; None takes 12 / steps of the constrained phase, between 0.01 and 0.5: Adam
            moves a gate by about its rate a step, and from open to closed it is a long way for a short run.
        weight_schedule: "cosine" lets the weights' rate fall to zero over the last half, "constant" keeps it.
        gate_schedule: the same for the gates; a falling rate can freeze them before the budget is met.
        weight_decay: coefficient of the expected L2 norm under the gates (001 eq. 17), probabilities detached.
        dual_rate: step size of the multipliers; None takes 20 / steps of the constrained phase.
        dual: what the multipliers watch: the "deployed" or the "expected" cost.
        restarts: dual restarts.
        warm_up: share of the constrained phase over which the limits fall from the dense cost to the budget.
        extrapolate: extrapolation from the past, primal and dual.
        keep: initial keep probability.
        per_example: one gate sample for every example.
        round_to: the shrunk model's widths are multiples of it.
        ema: decay of the parameters' exponential average, used for the metric and the result; None: no average.
        polish: share of the epochs that trains on after the landing with the gates fixed.
        polish_noise: keep the open gates' noise while polishing.
        accumulate: mini-batches a step.
        precision: "no" (float32) or "bf16".
        log_every: steps between two lines of the log; None takes about 400 lines a run.
    """

    epochs: int = 20
    batch_size: int = 128
    seed: int = 0
    method: str = "l0"
    weight_lr: float = 1e-3
    gate_lr: float | None = None
    weight_schedule: str = "cosine"
    gate_schedule: str = "constant"
    weight_decay: float = 0.0
    dual_rate: float | None = None
    dual: str = "deployed"
    restarts: bool = True
    warm_up: float = 0.8
    extrapolate: bool = False
    keep: float = 0.9
    per_example: bool = False
    round_to: int = 1
    ema: float | None = None
    polish: float = 0.3
    polish_noise: bool = False
    accumulate: int = 1
    precision: str = "no"
    log_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "round_to"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be 1 or more")
        _require(self.epochs <= MOST_EPOCHS, f"epochs is {self.epochs}; there can be {MOST_EPOCHS:,} at most")
        _require(0 <= self.seed < 2**63, f"seed is {self.seed}; a seed lies between 0 and 2^63 - 1")
        for name in ("weight_lr", "gate_lr", "dual_rate"):
            value = getattr(self, name)
            right = value is None or 0 < value < GREATEST
            _require(right, f"{name} is {value}; it must be above zero, and finite")
        right = 0 <= self.weight_decay < GREATEST
        _require(right, f"weight_decay is {self.weight_decay}; it must be zero or above, and finite")
        _require(0 < self.keep < 1, f"keep is {self.keep}; a keep probability lies between 0 and 1")
        _require(0 <= self.warm_up <= 1, f"warm_up is {self.warm_up}; it is a share of the epochs, from 0 to 1")
        _require(0 <= self.polish < 1, f"polish is {self.polish}; it is a share of the epochs, from 0 to below 1")
        _require(self.ema is None or 0 < self.ema < 1, f"ema is {self.ema}; a decay lies between 0 and 1")
        _require(self.method in METHODS, f"the method {self.method!r} is not known; there is: {', '.join(METHODS)}")
        for name in ("weight_schedule", "gate_schedule"):
            value = getattr(self, name)
            _require(value in SCHEDULES, f"{name} is {value!r}; there are: {', '.join(SCHEDULES)}")
        _require(self.precision in ("no", "bf16"), f"precision is {self.precision!r}; there are: no, bf16")
        right = self.log_every is None or self.log_every >= 1
        _require(right, f"log_every is {self.log_every}; it must be 1 or more")

    @property
    def polish_epochs(self) -> int:
        """Epochs after the landing: never all of them."""
        return min(self.epochs - 1, round(self.polish * self.epochs))

    @property
    def constrained_epochs(self) -> int:
        """Epochs under the budget's pressure."""
        return self.epochs - self.polish_epochs

    def gate_lr_for(self, steps: int) -> float:
        """The gates' rate for a constrained phase of so many steps."""
        return self.gate_lr if self.gate_lr is not None else min(0.5, max(0.01, 12.0 / max(1, steps)))

    def dual_rate_for(self, steps: int) -> float:
        """The multipliers' rate for a constrained phase of so many steps."""
        return self.dual_rate if self.dual_rate is not None else 20.0 / max(1, steps)

    def scale(self, which: str, epoch: float) -> float:
        """The factor on a rate ("weight" or "gate") at a point of the run, in epochs."""
        schedule = self.weight_schedule if which == "weight" else self.gate_schedule
        if schedule == "constant":
            return 1.0
        progress = epoch / self.epochs
        return 1.0 if progress < 0.5 else 0.5 * (1 + math.cos(math.pi * min(1.0, 2 * progress - 1)))

    def as_dict(self) -> dict[str, Any]:
        """For the record and the checkpoint."""
        return asdict(self)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise PrunusError(f"The setting {sentence}." if not sentence.startswith("the ") else f"T{sentence[1:]}.")
