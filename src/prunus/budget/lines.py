"""Reading budgets: `params=10%`, `bytes=4MB`, `macs=30%`, `layer:conv1=50%`, `layer:fc*:density=10%`."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from prunus.axes import Graph
from prunus.cost import Row
from prunus.errors import BudgetError, is_number, nearest
from prunus.graph import matches

WHATS = ("params", "macs", "bytes", "density")
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_BYTE_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """A limit as the user gave it: a fraction of the dense cost, or an absolute number."""

    value: float
    is_fraction: bool

    def __str__(self) -> str:
        return f"{self.value * 100:g}%" if self.is_fraction else f"{self.value:,.0f}"


@dataclass(frozen=True)
class Line:
    """One line of a budget: at most `limit` of `what`, in the whole model or in the layers that `where` names."""

    what: str
    where: str | None
    limit: Limit

    def __str__(self) -> str:
        return f"{self.name}={self.limit}"

    @property
    def name(self) -> str:
        """What the line counts, and where."""
        if self.where is None:
            return self.what
        return f"layer:{self.where}" + ("" if self.what == "params" else f":{self.what}")

    @property
    def row(self) -> Row:
        """What the cost function counts for it."""
        return Row(self.what, self.where)


def read_limit(value: Any, what: str, name: str) -> Limit:
    """Read a limit: 0.1 and "10%" are fractions, 100_000, "100k" and "4MB" absolute numbers.

    >>> read_limit("4MB", "bytes", "bytes"), str(read_limit(0.1, "params", "params"))
    (Limit(value=4000000.0, is_fraction=False), '10%')
    """
    hint = "write a fraction of the dense model such as 10% or 0.1, or an absolute number such as " + (
        "4MB" if what == "bytes" else "100000 or 100k"
    )
    if not isinstance(value, str):
        if not is_number(value):
            raise BudgetError(f"The budget {name} is {value!r}, which is no number; {hint}.")
        value = int(value) if isinstance(value, Integral) else float(value)  # numpy's numbers too
    if isinstance(value, int):
        if value <= 0:
            raise BudgetError(f"The budget {name}={value} must be above zero; {hint}.")
        return _absolute(float(value) if value < 2**1023 else math.inf, what, name)
    if isinstance(value, float):
        return _fraction(value, name, f"{value:g}", hint)
    text = value.strip()
    match = re.fullmatch(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*)", text)
    if match is None:
        raise BudgetError(f"The budget {name}={text} cannot be read; {hint}.")
    number, unit = float(match[1].replace("_", "")), match[2]
    if unit == "%":
        return _fraction(number / 100, name, text, hint)
    units = _BYTE_UNITS if what == "bytes" else _COUNT_UNITS
    if unit.lower() not in units:
        known = "%, B, kB, MB, GB, KiB, MiB, GiB" if what == "bytes" else "%, k, M, G"
        raise BudgetError(f"The budget {name}={text} has the unknown unit {unit!r}; known for {what}: {known}.")
    power = "e" in match[1].lower() and number > 1 and number.is_integer()  # 5e3
    whole = unit != "" or power or re.fullmatch(r"\+?[\d_]+", match[1]) is not None
    if number <= 0 or not whole:
        return _fraction(number, name, text, hint)
    return _absolute(number * units[unit.lower()], what, name)


def _fraction(value: float, name: str, text: str, hint: str) -> Limit:
    if not math.isfinite(value):
        raise BudgetError(f"The budget {name}={text} is no finite number; {hint}.")
    if value <= 0:
        raise BudgetError(f"The budget {name}={text} must be above zero; {hint}.")
    if value > 1:
        raise BudgetError(f"The budget {name}={text} is over 100% of the dense model; {hint}.")
    return Limit(value, True)


def _absolute(value: float, what: str, name: str) -> Limit:
    if not math.isfinite(value):
        raise BudgetError(f"The budget {name} is no finite number.")
    if what == "density":
        raise BudgetError(f"The budget {name} counts in the papers' density, a fraction: write 10% or 0.1.")
    return Limit(value, False)


def read_lines(totals: Mapping[str, Any], layers: Mapping[str, Any] | None = None) -> tuple[Line, ...]:
    """Read what `Budget` is given: totals by measure, and by layer a limit on parameters or several by measure."""
    lines = []
    for what, value in totals.items():
        if value is None:
            continue
        if what == "density" and isinstance(value, Mapping):
            for where, limit in value.items():
                name = f"layer:{where}:density"
                lines.append(Line("density", where, read_limit(limit, "density", name)))
            continue
        lines.append(Line(what, None, read_limit(value, what, what)))
    if not isinstance(layers, Mapping | None):
        raise BudgetError(f"layers is {layers!r}; write the limits by layer, for instance {{'conv1': 0.5}}.")
    for where, value in (layers or {}).items():
        if not isinstance(where, str):
            raise BudgetError(f"layers names the layer {where!r}; write its name or a pattern, such as 'fc*'.")
        for what, limit in (value if isinstance(value, Mapping) else {"params": value}).items():
            if what not in WHATS:
                raise BudgetError(f"The budget of layer {where} counts {what!r}; {nearest(str(what), WHATS)}.")
            name = Line(what, where, Limit(1.0, True)).name
            lines.append(Line(what, where, read_limit(limit, what, name)))
    return _consistent(lines)


def parse(specifications: Sequence[str]) -> tuple[Line, ...]:
    """Read budgets as the command line writes them.

    >>> [str(line) for line in parse(["params=10%", "layer:conv1=50%", "layer:fc*:macs=2k"])]
    ['params=10%', 'layer:conv1=50%', 'layer:fc*:macs=2,000']
    """
    lines = []
    for text in specifications:
        name, equals, value = text.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not value:
            raise BudgetError(f"The budget {text!r} has no limit; write for instance params=10%.")
        what, where = name, None
        if name.startswith("layer:"):
            where, _, what = name.removeprefix("layer:").partition(":")
            what = what or "params"
            if not where:
                raise BudgetError(f"The budget {text!r} names no layer; write for instance layer:conv1=50%.")
        if what not in WHATS:
            raise BudgetError(
                f"The budget {text!r} counts {what!r}, which is nothing Prunus can count; {nearest(what, WHATS)}. "
                "A layer's budget is written layer:NAME=50%."
            )
        lines.append(Line(what, where, read_limit(value, what, name)))
    return _consistent(lines)


def _consistent(lines: list[Line]) -> tuple[Line, ...]:
    seen: dict[str, Line] = {}
    for line in lines:
        before = seen.setdefault(line.name, line)
        if before != line:
            raise BudgetError(f"Two budgets contradict each other: {before} and {line}. Keep one of them.")
    if not lines:
        raise BudgetError("A budget needs at least one limit: params=, macs=, bytes=, density= or layers=.")
    return tuple(seen.values())


def chooser(graph: Graph, line: Line) -> Callable[[str], bool]:
    """Which tensors a line counts. A layer's name is a module path, a pattern, or a module that holds others."""
    if line.where is None:
        return lambda tensor: True
    modules = {name.rpartition(".")[0]: None for name in graph.tensors}
    pattern = line.where
    if not any(matches(module, [pattern]) for module in modules):
        raise BudgetError(f"The budget {line} names the layer {pattern!r}, which this model does not have; "
                          f"{nearest(pattern, modules)}.")  # fmt: skip
    return lambda tensor: matches(tensor.rpartition(".")[0], [pattern])
