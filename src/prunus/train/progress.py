"""What a person sees while a run trains: one line that moves, with the time that is left; on stderr, by `rich`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from prunus.budget import Budget
from prunus.train.settings import Settings


class Progress:
    """The progress of one run. On a terminal a moving bar; elsewhere one plain line an epoch; quiet if asked."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._names: list[str] = []
        self._epochs = 0
        self._metric: float | None = None
        self._began = 0.0

    @contextmanager
    def running(self, settings: Settings, budget: Budget) -> Iterator[None]:
        """Show progress while a run goes on."""
        self._names = [line.name for line in budget.lines]
        self._epochs = settings.epochs
        self._began = time.perf_counter()
        if self.quiet or not self.console.is_terminal:
            yield
            return
        with self._make() as self._bar:
            self._task = self._bar.add_task("training", total=settings.epochs, facts="")
            yield
        self._bar = None

    def _make(self) -> Bar:
        return Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )

    def step(self, epoch: float, loss: float, readings: list[dict[str, Any]]) -> None:
        """A few times an epoch."""
        if self._bar is not None and self._task is not None:
            metric = "" if self._metric is None else f" acc {self._metric:.2%}"
            self._bar.update(
                self._task,
                completed=epoch,
                description=f"epoch {epoch:.1f}/{self._epochs}",
                facts=f"loss {loss:.4f}{metric} {self._budgets(readings)}",
            )

    def epoch(self, epoch: int, loss: float, metric: float, readings: list[dict[str, Any]]) -> None:
        """After every epoch."""
        self._metric = metric
        if self._bar is not None:
            self.step(float(epoch), loss, readings)
        elif not self.quiet:
            spent = time.perf_counter() - self._began
            left = spent / max(1, epoch) * (self._epochs - epoch)
            self.console.print(
                f"epoch {epoch}/{self._epochs}  loss {loss:.4f}  acc {metric:.2%}  {self._budgets(readings)}  "
                f"{spent:.0f} s, {left:.0f} s left",
                soft_wrap=True,
            )

    def _budgets(self, readings: list[dict[str, Any]]) -> str:
        parts = []
        for name, r in zip(self._names, readings, strict=True):
            dense = r["dense"] or 1
            parts.append(
                f"{name} exp {r['expected'] / dense:.1%} dep {r['deployed'] / dense:.1%} of {r['limit'] / dense:.1%} "
                f"λ {r['multiplier']:.2g}"
            )
        return "  ".join(parts)

    def baseline(self, epochs: int) -> Callable[[float], None]:
        """Progress of the dense baseline."""
        began = time.perf_counter()
        step = max(1, epochs // 5)

        def tick(epoch: float) -> None:
            if not self.quiet and int(epoch) % step == 0:
                spent = time.perf_counter() - began
                self.console.print(
                    f"dense baseline: epoch {epoch:.0f}/{epochs}, {spent / epoch * (epochs - epoch):.0f} s left"
                )

        return tick

    def say(self, what: str) -> None:
        """Name what goes on now."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what)

    def warn(self, message: str) -> None:
        """A plain warning above the bar."""
        if not self.quiet:
            self.console.print(f"[yellow]warning:[/] {message}", soft_wrap=True)
