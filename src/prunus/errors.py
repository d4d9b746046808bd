"""What can go wrong by the user's hand, each as one plain sentence.

The command line prints the sentence and ends with the class's `exit_code`; nothing else in Prunus decides exit codes.
"""

import difflib
import sys
import warnings
from collections.abc import Iterable
from numbers import Real


class PrunusError(ValueError):
    """The user's mistake: the message says what was wrong, where, and what would be right."""

    exit_code = 2


class BudgetError(PrunusError):
    """A budget that cannot be read, names nothing, contradicts another, or cannot be reached."""


class ModelError(PrunusError):
    """A model that cannot be imported, exported or shrunk."""


class InexactSurgery(ModelError):
    """A shrunk model that does not equal the gated one: refused, never returned."""


class DataError(PrunusError):
    """Data that is missing, damaged, empty or does not fit the model."""


class ArtefactError(PrunusError):
    """A file of weights, a checkpoint or a run folder that is damaged, hostile or another model's."""


class OutputError(PrunusError):
    """A folder or file that cannot be written: read-only, full, or in use."""


class PrunusWarning(UserWarning):
    """Something that works, but probably not as the user means it."""


class RunFailed(PrunusError):
    """A run that diverged or cannot be brought under its budget."""

    exit_code = 3


def warn(sentence: str) -> None:
    """Warn, pointing at the line of the user's that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("prunus", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, PrunusWarning, stacklevel=level)


def is_number(value: object) -> bool:
    """Is it a real number: Python's own, or numpy's?"""
    return isinstance(value, Real) and not isinstance(value, bool)


def said(error: BaseException, most: int = 160) -> str:
    """What another library's error says, in one line of whole words.

    >>> said(RuntimeError("one two three"), most=9)
    'RuntimeError: one two …'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".") if lines else ""
    if len(text) > most:
        text = text[: most + 1].rpartition(" ")[0] + " …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def several(unit: str, number: int | None = None) -> str:
    """The word for a kind of unit, for so many of them.

    >>> several("branch"), several("map", 3), several("head dim", 1)
    ('branches', 'maps', 'head dim')
    """
    return unit if number == 1 else unit + ("es" if unit.endswith("ch") else "s")


def nearest(name: str, names: Iterable[str]) -> str:
    """Say which of `names` look like `name`, as the end of a sentence.

    >>> nearest("conv11", ["conv1", "conv2", "fc1"])
    'nearest: conv1, conv2'
    >>> nearest("zzz", ["conv1", "fc1"])
    'there are: conv1, fc1'
    """
    known = list(dict.fromkeys(names))
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return "nearest: " + ", ".join(close)
    shown = known[:12]
    return "there are: " + ", ".join(shown) + (f" and {len(known) - 12} more" if len(known) > 12 else "")
