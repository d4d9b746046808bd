"""What a person sees while a run trains: a bar with the facts below it and the time that is left; on stderr, by
`rich`."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from prunus.budget import Budget
from prunus.train.settings import Settings


class _Bar(Bar):
    """A bar with lines of facts below it."""

    below: Text = Text("")

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, then the facts."""
        yield self.make_tasks_table(self.tasks)
        if self.below.plain:
            yield self.below


class Progress:
    """The progress of one run. On a terminal a moving bar; elsewhere one plain line an epoch; quiet if asked."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._bar: _Bar | None = None
        self._task: TaskID | None = None
        self._names: list[str] = []
        self._epochs = 0
        self._metric: float | None = None
        self._began = 0.0
        self._first: int | None = None  # the first epoch that was finished here: a resumed run did not spend the others
        self._warned: list[str] = []

    @contextmanager
    def running(self, settings: Settings, budget: Budget) -> Iterator[None]:
        """Show progress while a run goes on."""
        self._names = [line.name for line in budget.lines]
        self._epochs = settings.epochs
        self._began = time.perf_counter()
        self._first = None
        self._open("training", settings.epochs)
        try:
            yield
        finally:
            self.close()

    def _open(self, what: str, total: int) -> None:
        self.close()
        if not self.quiet and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._bar = _Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self.console,
                transient=True,
            )
            self._task = self._bar.add_task(what, total=total)
            self._bar.start()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def step(self, epoch: float, loss: float, readings: list[dict[str, Any]]) -> None:
        """A few times an epoch."""
        if self._bar is not None and self._task is not None:
            lines = [self._quality(loss), *self._budgets(readings)]
            self._bar.below = Text("\n".join(lines), style="dim", no_wrap=True, overflow="ellipsis")
            self._bar.update(self._task, completed=epoch, description=f"epoch {epoch:.1f} of {self._epochs}")

    def epoch(self, epoch: int, loss: float, metric: float, readings: list[dict[str, Any]]) -> None:
        """After every epoch."""
        self._metric = metric
        self._first = self._first or epoch
        if self._bar is not None:
            self.step(float(epoch), loss, readings)
        elif not self.quiet:
            spent = time.perf_counter() - self._began
            left = spent / (epoch - self._first + 1) * (self._epochs - epoch)
            facts = "  ".join([self._quality(loss), *self._budgets(readings)])
            self._say(f"epoch {epoch}/{self._epochs}  {facts}  {duration(spent)}, {duration(left)} left")

    def _quality(self, loss: float) -> str:
        return f"loss {loss:.4f}" + ("" if self._metric is None else f"  test accuracy {self._metric:.2%}")

    def _budgets(self, readings: list[dict[str, Any]]) -> list[str]:
        """Every budget in parts of the dense cost."""
        parts = []
        for name, r in zip(self._names, readings, strict=True):
            shares = [_percent(r[key] / (r["dense"] or 1)) for key in ("expected", "deployed", "limit")]
            said = "expected {}, deployed {}, limit {}".format(*shares)
            parts.append(f"{name}: {said}, multiplier {abs(r['multiplier']):.3g}")
        return parts

    def baseline(self, epochs: int) -> Callable[[float], None]:
        """Progress of the dense baseline."""
        began = time.perf_counter()
        every = max(1, epochs // 5)
        self._open("dense baseline", epochs)

        def tick(epoch: float) -> None:
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, completed=epoch)
                if epoch >= epochs:
                    self.close()
            elif not self.quiet and int(epoch) % every == 0:
                left = (time.perf_counter() - began) / epoch * (epochs - epoch)
                self._say(f"dense baseline: epoch {epoch:.0f}/{epochs}, {duration(left)} left")

        return tick

    def say(self, what: str) -> None:
        """Name what goes on now."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what)

    def warn(self, message: str) -> None:
        """A plain warning above the bar, each once."""
        if not self.quiet and message not in self._warned:
            self._warned.append(message)
            self.console.print(Text.assemble(("warning: ", "yellow"), message), soft_wrap=not self.console.is_terminal)

    def _say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(8.6), duration(200), duration(9000)
    ('9 s', '3 min', '2 h 30 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _percent(share: float) -> str:
    """One digit behind the point, more where that would be nothing.

    >>> _percent(0.123), _percent(1.0), _percent(0.00012)
    ('12.3%', '100.0%', '0.012%')
    """
    return f"{share:.1%}" if share >= 0.001 else f"{share * 100:.2g}%"
