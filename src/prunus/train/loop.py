"""The reference loop: forward, Lagrangian, backward, primal step, dual step, in this order.

Prunus needs no trainer: `budget.pressure()` and `budget.step()` go into anybody's loop. This one is what the command
line runs, in one process, on `accelerate` for devices and precision.
"""

import os
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn import functional as F

from prunus.budget import Budget, Line
from prunus.data import Batches, Dataset
from prunus.errors import ArtefactError, ModelError, PrunusError, RunFailed, said
from prunus.extrapolation import ExtrapolationFromThePast
from prunus.files import writable_folder
from prunus.front import gate
from prunus.gated import Gated
from prunus.landing import land
from prunus.measure import evaluating
from prunus.record import Writer
from prunus.train import checkpoint
from prunus.train.average import Average
from prunus.train.metric import accuracy
from prunus.train.progress import Progress
from prunus.train.settings import Settings
from prunus.train.trend import warning

LOG_LINES = 400
FALLEN = 0.1  # an accuracy that ends this far below its best is worth a warning


class Run:
    """One training run: everything that changes while it trains, and that a checkpoint holds."""

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        data: Dataset,
        lines: tuple[Line, ...],
        settings: Settings,
        out: Path,
        *,
        device: str | None = None,
        names: tuple[str, str] = ("", ""),
        progress: Progress | None = None,
        gate_options: dict[str, Any] | None = None,
    ) -> None:
        one_process()
        self.settings, self.out, self.names = settings, out, names
        self.progress = progress or Progress(quiet=True)
        writable_folder(out)
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(mixed_precision=settings.precision, cpu=device == "cpu")
        self.device = torch.device(device) if device else self.accelerator.device
        self.data = data.to(self.device)
        self.inputs = _to(example_inputs, self.device)
        torch.manual_seed(settings.seed)
        model = model.to(self.device)
        options: dict[str, Any] = {
            "keep": settings.keep, "per_example": settings.per_example, "round_to": settings.round_to,
            **(gate_options or {}),
        }  # fmt: skip
        self.gated: Gated = gate(model, self.inputs, **options).to(self.device)
        _check_outputs(self.gated, self.data)
        self.batches = Batches(self.data.train_x, self.data.train_y, settings.batch_size, seed=settings.seed)
        self.steps_per_epoch = -(-len(self.batches) // settings.accumulate)
        steps = self.steps_per_epoch * settings.constrained_epochs
        self.budget = Budget(
            self.gated,
            lines=lines,
            dual_rate=settings.dual_rate_for(steps),
            dual=settings.dual,
            restarts=settings.restarts,
            extrapolate=settings.extrapolate,
        )
        self.base_rates = {"weight": settings.weight_lr, "gate": settings.gate_lr_for(steps)}
        adam = torch.optim.Adam(
            [
                {"params": list(self.gated.weight_parameters()), "lr": settings.weight_lr, "which": "weight"},
                {"params": list(self.gated.gate_parameters()), "lr": self.base_rates["gate"], "which": "gate"},
            ]
        )
        self.optimizer = ExtrapolationFromThePast(adam) if settings.extrapolate else adam
        trained = [*self.gated.weight_parameters(), *self.gated.gate_parameters()]
        self.average = Average(trained, settings.ema) if settings.ema is not None else None
        self.epoch = 0
        self.step = 0
        self.seconds = 0.0
        self.history: list[list[float]] = []
        self.warned: list[str] = []
        self.best = 0.0
        self.log_every = settings.log_every or max(1, self.steps_per_epoch * settings.epochs // LOG_LINES)

    # ---- training --------------------------------------------------------------------------------------------------

    def train(self, log: Writer) -> None:
        """Train to the end, from wherever the run stands."""
        network, optimizer = self.accelerator.prepare(self.gated, self.optimizer)
        settings = self.settings
        while self.epoch < settings.epochs:
            began = time.perf_counter()
            if self.epoch == settings.constrained_epochs and not self.gated.fixed:
                self._land(log)
            loss = self._one_epoch(network, optimizer, log)
            self.epoch += 1
            value = self._metric()
            self.seconds += time.perf_counter() - began
            self._close_epoch(log, loss, value)
            self.save_checkpoint(log)
        if not self.gated.fixed:
            self._land(log)
        else:
            self.settle()

    def _one_epoch(self, network: nn.Module, optimizer: Any, log: Writer) -> float:
        """One pass over the data; gives the mean loss."""
        settings, budget, gated = self.settings, self.budget, self.gated
        gated.train()
        total = torch.zeros((), device=self.device)
        seen = 0
        batches = len(self.batches)
        for k, (x, y) in enumerate(self.batches):
            last = (k + 1) % settings.accumulate == 0 or k + 1 == batches
            for group in optimizer.param_groups:
                at = self.epoch + k / batches
                group["lr"] = self.base_rates[group["which"]] * settings.scale(group["which"], at)
            if settings.warm_up:
                budget.tighten((self.epoch + k / batches) / (settings.warm_up * settings.constrained_epochs))
            loss = F.cross_entropy(network(x), y)
            lagrangian = loss + budget.pressure()
            if settings.weight_decay:
                lagrangian = lagrangian + settings.weight_decay / 2 * gated.expected_l2(detach=True)
            self.accelerator.backward(lagrangian / settings.accumulate)
            total += loss.detach()
            seen += 1
            if not last:
                continue
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            budget.step()
            if settings.extrapolate and not gated.fixed:
                with self.settled():
                    gated.gates.clamp_(gated.log_alpha)
            if self.average is not None:
                self.average.update()
            self.step += 1
            if self.step % self.log_every == 0:
                self._log_step(log, total / seen)
        mean = float(total) / max(1, seen)
        self._finite(mean)
        # The last step's loss was computed before that step; nothing else may spoil the next checkpoint.
        held = [t for t in (*gated.parameters(), *gated.model.buffers()) if t.is_floating_point()]
        if held and not bool(torch.stack([t.detach().isfinite().all() for t in held]).all()):
            self._finite(float("nan"), "A weight")
        return mean

    def _finite(self, loss: float, what: str = "The loss") -> None:
        if loss != loss or loss in (float("inf"), float("-inf")):
            kept = f"The checkpoint of epoch {self.epoch} is kept." if self.epoch else "No epoch was finished."
            raise RunFailed(
                f"{what} became {loss} in epoch {self.epoch + 1}, at or before step {self.step}: training diverged. "
                f"{kept} Lower the learning rates (now {self.settings.weight_lr:g} for the weights and "
                f"{self.base_rates['gate']:g} for the gates)"
                + (f" or the weight decay (now {self.settings.weight_decay:g})." if self.settings.weight_decay else ".")
            )

    def _log_step(self, log: Writer, mean: Tensor) -> None:
        loss = float(mean)
        self._finite(loss)
        readings = self.budget.readings()
        epoch = self.step / self.steps_per_epoch
        expected = self.gated.expected()
        log.write("step", step=self.step, epoch=epoch, loss=loss, expected=expected, budgets=_lines(readings))
        self.progress.step(epoch, loss, readings)

    def _land(self, log: Writer) -> None:
        """Close what training left above the budget, and fix the gates for the polish."""
        self.settle()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said below, where the record sees it too
            done = land(self.gated, self.budget)
            self.gated.fix(noise=self.settings.polish_noise)
        if self.average is not None:
            self.average.restart()
        log.write("landing", epoch=self.epoch, **done.as_dict())
        if done.advice:
            self._warn(log, done.advice)

    def _warn(self, log: Writer, message: str) -> None:
        log.write("warning", message=message)
        self.progress.warn(message)

    def _metric(self) -> float:
        with self.average.in_place() if self.average is not None else self.settled():
            return accuracy(self.gated, self.data.test_x, self.data.test_y)

    def settle(self) -> None:
        """Put into the model, for good, what would be deployed: the average, or where extrapolation started from."""
        if isinstance(self.optimizer, ExtrapolationFromThePast):
            self.optimizer.settle()
        if self.average is not None:
            self.average.take()

    def settled(self) -> Any:
        """The parameters before extrapolation moved them ahead, for a while."""
        if isinstance(self.optimizer, ExtrapolationFromThePast) and self.step:
            return self.optimizer.settled()
        return nullcontext()

    def _close_epoch(self, log: Writer, loss: float, value: float) -> None:
        readings = self.budget.readings()
        keep = self.gated.keep()
        opened = torch.histc(self.gated.p_active().detach().float().cpu(), bins=20, min=0, max=1)
        log.write(
            "epoch",
            epoch=self.epoch,
            step=self.step,
            phase="polish" if self.gated.fixed else "train",
            loss=loss,
            metric={"name": "accuracy", "value": value},
            seconds=self.seconds,
            expected=self.gated.expected(),
            deployed=self.gated.deployed(),
            budgets=_lines(readings),
            kept={name: int(mask.sum()) for name, mask in keep.units.items()},
            open=[int(count) for count in opened.tolist()],
        )
        self.progress.epoch(self.epoch, loss, value, readings)
        self.best = max(self.best, value)
        if self.epoch == self.settings.epochs and self.best - value > FALLEN:
            self._warn(
                log,
                f"The accuracy fell from {self.best:.1%} to {value:.1%}: the network was pressed faster than it could "
                "learn. Train for more epochs, lower the dual rate, or loosen the budget.",
            )
        if not self.gated.fixed:
            self.history.append([reading["deployed"] / reading["limit"] for reading in readings])
            for k, line in enumerate(self.budget.lines):
                past = [row[k] for row in self.history]
                epochs, reading = self.settings.constrained_epochs, readings[k]
                falling = self.settings.warm_up * epochs
                start = reading["dense"] / reading["limit"]
                message = warning(line.name, str(line.limit), past, epochs, start, falling)
                if message and line.name not in self.warned:
                    self.warned.append(line.name)
                    self._warn(log, message)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def checkpoint_folder(self) -> Path:
        """Where the checkpoint lies."""
        return self.out / "checkpoint"

    def save_checkpoint(self, log: Writer) -> None:
        """Write everything that this run needs to go on exactly."""
        tensors = checkpoint.module_tensors("gated", self.gated)
        tensors |= checkpoint.optimizer_tensors("optimizer", self.optimizer)
        tensors |= {f"budget.{key}": value for key, value in self.budget.state_dict().items()}
        tensors |= {f"batches.{key}": value for key, value in self.batches.state_dict().items()}
        tensors |= checkpoint.random_state(self.device)
        if self.average is not None:
            tensors |= {f"average.{k}": value for k, value in enumerate(self.average.values)}
        facts = {
            "settings": self.settings.as_dict(),
            "names": list(self.names),
            "budgets": [str(line) for line in self.budget.lines],
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "warned": self.warned,
            "best": self.best,
            "fixed": self.gated.fixed,
            "landing": self.gated.landing,
            "average_steps": self.average.steps if self.average is not None else 0,
            "log_bytes": log.tell(),
        }
        checkpoint.write(self.checkpoint_folder, tensors, facts)

    def restore(self) -> int:
        """Go on from the checkpoint; gives the length of the log at that time.

        Raises:
            ArtefactError: it is damaged, another model's, or was made with other settings.
        """
        tensors, facts = checkpoint.read(self.checkpoint_folder)
        where = str(self.checkpoint_folder)
        lines = [str(line) for line in self.budget.lines]
        if facts["budgets"] != lines:
            raise ArtefactError(
                f"The checkpoint {where} was made for {', '.join(facts['budgets'])}, not for {', '.join(lines)}."
            )
        mine = self.settings.as_dict()
        other = [name for name, value in mine.items() if facts["settings"].get(name, value) != value]
        if other:
            raise ArtefactError(
                f"The checkpoint {where} was made with {other[0]}={facts['settings'][other[0]]}, not {mine[other[0]]}; "
                "resume with the same settings, or start anew without --resume."
            )
        checkpoint.restore_module("gated", self.gated, tensors, where)
        self.gated.landing = facts["landing"]
        if facts["fixed"]:
            self.gated.fix(noise=self.settings.polish_noise)
        checkpoint.restore_optimizer("optimizer", self.optimizer, tensors)
        self.budget.load_state_dict(_under("budget.", tensors))
        self.batches.load_state_dict(_under("batches.", tensors))
        if self.average is not None:
            for k, value in enumerate(self.average.values):
                value.copy_(tensors[f"average.{k}"])
            self.average.steps = facts["average_steps"]
        self.epoch, self.step, self.seconds = facts["epoch"], facts["step"], facts["seconds"]
        self.history, self.warned, self.best = facts["history"], facts["warned"], facts["best"]
        checkpoint.restore_random(tensors, self.device)
        return int(facts["log_bytes"])


def one_process() -> None:
    """The loop trains in one process; started as one of several, every one would train the same run.

    Raises:
        PrunusError: it was started by a launcher as one of several.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise PrunusError(
            f"The reference loop trains in one process, and this was launched as one of {os.environ['WORLD_SIZE']}: "
            "start it without a launcher, or put prunus.gate and prunus.Budget into your own distributed loop."
        )


def _lines(readings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: reading[key] for key in ("expected", "deployed", "paper", "multiplier")} for reading in readings]


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _to(value: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, value)


def _check_outputs(gated: Gated, data: Dataset) -> None:
    """The model must take the data and tell at least its classes apart."""
    with evaluating(gated):
        try:
            result = gated(data.train_x[:2])
        except Exception as error:
            raise ModelError(
                f"The model cannot take inputs of shape {tuple(data.train_x.shape[1:])} from the data {data.name} "
                f"({said(error)})."
            ) from error
    if not isinstance(result, Tensor) or result.dim() != 2:
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ModelError(f"The model returns {shape}; the reference loop needs one row of class scores an example.")
    if result.shape[1] < data.classes:
        raise ModelError(f"The model tells {result.shape[1]} classes apart, the data {data.name} has {data.classes}.")
