"""One run as the report sees it: its log and its receipt, read once, with every missing piece made harmless.

A report must open for a run that was killed in its first minute, so nothing but the `start` line is taken for granted;
numbers that are missing are NaN from here on.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunus import record
from prunus.errors import ArtefactError
from prunus.report import numbers

COSTS = ("params", "macs", "bytes")
COST_NAMES = {"params": "parameters", "macs": "MACs", "bytes": "bytes", "density": "density"}
READINGS = ("expected", "deployed", "paper")

Record = dict[str, Any]
Series = NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """How many units of a group there were, and how many are kept (NaN: not known)."""

    name: str
    unit: str
    size: float
    kept: float


@dataclass(frozen=True)
class Budget:
    """A budget and how the run stands to it; costs are absolute, and `dense` is what the whole would cost.

    `paper` is a share of the gates, hence a fraction; one over 1 is taken for a cost.
    """

    what: str
    where: str | None
    limit: float
    dense: float
    expected: float
    deployed: float
    paper: float
    met: bool | None

    @property
    def label(self) -> str:
        """Name the budget: what it limits, and of what."""
        return budget_label(self.what, self.where)


@dataclass(frozen=True)
class Metric:
    """The quality of the dense, the gated and the shrunk model."""

    name: str
    dense: float
    gated: float
    shrunk: float


class Run:
    """A run folder, read.

    Raises:
        ArtefactError: the log is missing, broken or of another schema, or the receipt is not one.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder = folder
        self.name = numbers.text(name or folder.resolve().name or "run")
        lines = record.read(folder / "log.jsonl")
        self.start: Record = next((line for line in lines if line["kind"] == "start"), {})
        if not self.start:
            raise ArtefactError(f"The log {folder / 'log.jsonl'} has no start line: the run had not begun.")
        if self.start.get("schema", record.SCHEMA) != record.SCHEMA:
            raise ArtefactError(
                f"The log {folder / 'log.jsonl'} has schema {self.start['schema']}; "
                f"this version of Prunus reads schema {record.SCHEMA}."
            )
        self.steps = [line for line in lines if line["kind"] == "step"]
        self.epochs = [line for line in lines if line["kind"] == "epoch"]
        self.landing: Record | None = next((line for line in reversed(lines) if line["kind"] == "landing"), None)
        self.warnings = [numbers.text(line.get("message", "")) for line in lines if line["kind"] == "warning"]
        self.end: Record | None = next((line for line in reversed(lines) if line["kind"] == "end"), None)
        receipt = read_receipt(folder / "receipt.json")
        # Without an end line the receipt is of a checkpoint on the way (`prunus shrink`), not of the run's end.
        self.stale = bool(receipt) and self.end is None
        self.receipt = as_record(self.end.get("receipt")) if self.end is not None else {}
        if receipt and not self.stale:
            self.receipt = receipt
        lost = int(np.isnan(self.series("loss")).sum()) if self.steps else 0
        if lost:
            self.warnings.append(f"{lost:,} of {len(self.steps):,} recorded losses were not finite numbers.")

    @property
    def finished(self) -> bool:
        """Whether there is a result to speak of."""
        return bool(self.receipt)

    @property
    def lines(self) -> list[Record]:
        """The finest record of the run there is: its steps, or its epochs where no steps were recorded."""
        return self.steps or self.epochs

    @cached_property
    def last(self) -> Record:
        """The latest line that knows the deployed costs."""
        return self.epochs[-1] if self.epochs else {}

    @cached_property
    def dense(self) -> Record:
        """What the dense model costs."""
        return as_record(self.receipt.get("dense")) or as_record(self.start.get("dense"))

    @cached_property
    def deployed(self) -> Record:
        """What the deployed model costs, or would cost if the run ended at its last epoch."""
        return as_record(self.receipt.get("deployed")) or as_record(self.last.get("deployed"))

    @cached_property
    def details(self) -> Record:
        """The receipt's facts about the run, or the same facts from the log."""
        known = {key: self.start.get(key) for key in ("seed", "device", "epochs", "method", "versions")}
        known["seconds"] = as_record(self.end).get("seconds")
        return {**known, **{k: v for k, v in as_record(self.receipt.get("run")).items() if v is not None}}

    def kept(self, what: str) -> float:
        """Fraction of a cost that is kept."""
        return numbers.fraction(self.deployed.get(what), self.dense.get(what))

    def x(self, lines: Sequence[Record] | None = None) -> Series:
        """Steps of the lines."""
        return column(self.lines if lines is None else lines, "step")

    def series(self, *keys: str) -> Series:
        """One field over `lines`."""
        return column(self.lines, *keys)

    def budget_curve(self, index: int, field: str) -> tuple[Series, Series]:
        """Steps, and one field of one budget as a fraction of its dense cost (a multiplier as it is)."""
        scale = 1.0 if field == "multiplier" else self.logged_budgets[index].dense or np.nan

        def read(lines: list[Record]) -> Series:
            rows = [as_list(line.get("budgets")) for line in lines]
            return np.array(
                [numbers.number(as_record(r[index]).get(field)) if index < len(r) else np.nan for r in rows]
            )

        return self._finest(lambda lines: read(lines) / scale)

    def share(self, reading: str, what: str) -> tuple[Series, Series]:
        """Steps, and a cost of the whole model as a fraction of the dense one."""
        dense = numbers.number(self.dense.get(what)) or np.nan
        return self._finest(lambda lines: column(lines, reading, what) / dense)

    def _finest(self, read: Callable[[list[Record]], Series]) -> tuple[Series, Series]:
        """Read from the steps, or from the epochs where the steps do not tell."""
        fine = read(self.steps)
        if np.isfinite(fine).any():
            return self.x(self.steps), fine
        return self.x(self.epochs), read(self.epochs)

    @cached_property
    def logged_budgets(self) -> list[Budget]:
        """The budgets as the log orders them, standing as the last line has them."""
        latest = as_list(as_record((self.epochs or self.steps or [{}])[-1]).get("budgets"))
        now = [as_record(row) for row in latest]
        return [
            _budget({**as_record(row), **(now[i] if i < len(now) else {})}, self)
            for i, row in enumerate(as_list(self.start.get("budgets")))
        ]

    @cached_property
    def budgets(self) -> list[Budget]:
        """The budgets with the receipt's word on them, or the log's latest."""
        rows = as_list(self.receipt.get("budgets"))
        return [_budget(as_record(row), self) for row in rows] if rows else self.logged_budgets

    @cached_property
    def groups(self) -> list[Group]:
        """Every group, in the order of the log."""
        start = {str(as_record(g).get("name")): as_record(g) for g in as_list(self.start.get("groups"))}
        measured = {str(k): as_record(v) for k, v in as_record(self.receipt.get("groups")).items()}
        latest = as_record(self.last.get("kept"))
        found = []
        for name in dict.fromkeys([*start, *measured]):
            units, seen = start.get(name, {}), measured.get(name)
            kept = len(as_list(seen.get("kept"))) if seen else latest.get(name)
            size = units.get("size", as_record(seen).get("size"))
            found.append(
                Group(numbers.text(name), numbers.text(units.get("unit") or "unit"), *map(numbers.number, (size, kept)))
            )
        return found

    @cached_property
    def metric(self) -> Metric | None:
        """The metric of the result, or of the last epoch so far."""
        final = as_record(self.receipt.get("metric"))
        if final:
            dense, gated, shrunk = (numbers.number(final.get(key)) for key in ("dense", "gated", "shrunk"))
            return Metric(numbers.text(final.get("name") or "metric"), dense, gated, shrunk)
        latest = as_record(self.last.get("metric"))
        if not latest:
            return None
        return Metric(numbers.text(latest.get("name") or "metric"), np.nan, numbers.number(latest.get("value")), np.nan)

    def landing_step(self) -> float:
        """The step at which the run landed, NaN if it has not."""
        if self.landing is None:
            return np.nan
        epoch = numbers.number(self.landing.get("epoch"))
        at = [numbers.number(line.get("step")) for line in self.epochs if line.get("epoch") == self.landing["epoch"]]
        return at[0] if at else epoch * numbers.number(self.start.get("steps_per_epoch"))

    def polish(self) -> tuple[float, float] | None:
        """First and last step of the polish phase."""
        polish = [i for i, line in enumerate(self.epochs) if line.get("phase") == "polish"]
        if not polish:
            return None
        steps = self.x(self.epochs)
        before = steps[polish[0] - 1] if polish[0] else 0.0
        return float(before), float(steps[polish[-1]])


def load(folders: Sequence[Path]) -> list[Run]:
    """Read the runs, naming each by its folder; runs whose folders are called alike are told apart by their parents."""
    names = [folder.resolve().name for folder in folders]
    runs: list[Run] = []
    for i, (folder, name) in enumerate(zip(folders, names, strict=True)):
        if names.count(name) > 1:
            name = f"{folder.resolve().parent.name}/{name}"
        if any(run.name == name for run in runs):
            name = f"{name} ({i + 1})"
        runs.append(Run(folder, name))
    return runs


def read_receipt(path: Path) -> Record:
    """Read a receipt; an empty one where there is no file."""
    try:
        receipt = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ArtefactError(f"The receipt {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"The receipt {path} is not JSON.") from error
    shapes = {"dense": dict, "deployed": dict, "budgets": list, "groups": dict, "exactness": dict, "metric": dict}
    if not isinstance(receipt, dict):
        raise ArtefactError(f"The receipt {path} is not a receipt: it should be one JSON object.")
    for key, shape in {**shapes, "run": dict}.items():
        if not isinstance(receipt.get(key), shape | None):
            raise ArtefactError(f"The receipt {path} is not a receipt: its `{key}` is not {_SHAPES[shape]}.")
    if receipt.get("schema", record.SCHEMA) != record.SCHEMA:
        raise ArtefactError(
            f"The receipt {path} has schema {receipt['schema']}; this version of Prunus reads schema {record.SCHEMA}."
        )
    return receipt


_SHAPES: dict[type, str] = {dict: "an object", list: "a list"}


def as_record(value: Any) -> Record:
    """An object, or an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """A list, or an empty one in place of anything else."""
    return value if isinstance(value, list) else []


def column(lines: Sequence[Record], *keys: str) -> Series:
    """One field of many lines, reached through nested objects; NaN where it is missing."""
    values = []
    for line in lines:
        value: Any = line
        for key in keys:
            value = as_record(value).get(key)
        values.append(numbers.number(value))
    return np.array(values, dtype=float)


def budget_label(what: str, where: Any) -> str:
    """Name a budget: what it limits, and of what."""
    place = _place(where)
    return numbers.text(COST_NAMES.get(what, what)) + (f" of {place}" if place else "")


def _place(where: Any) -> str | None:
    """The part of the model a budget is on; None for the whole."""
    if isinstance(where, list):
        where = ", ".join(map(str, where))
    return numbers.text(where) if where else None


def _budget(row: Record, run: Run) -> Budget:
    what, where = str(row.get("what")), _place(row.get("where"))
    dense = numbers.number(row.get("dense"))
    if np.isnan(dense):  # a receipt's row has no `dense`: the log's row of the same budget has it
        if what == "density":
            dense = 1.0
        else:
            alike = (
                as_record(b)
                for b in as_list(run.start.get("budgets"))
                if (as_record(b).get("what"), as_record(b).get("where")) == (row.get("what"), row.get("where"))
            )
            same = next(alike, {}).get("dense")
            dense = numbers.number(same if same is not None or where else run.dense.get(what))
    limit, expected, deployed, paper = (numbers.number(row.get(key)) for key in ("limit", *READINGS))
    met = row.get("met")
    if not isinstance(met, bool):
        met = bool(deployed <= limit) if np.isfinite(deployed) and np.isfinite(limit) else None
    return Budget(numbers.text(what), where, limit, dense, expected, deployed, paper, met)
