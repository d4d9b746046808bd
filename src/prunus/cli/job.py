"""What a run is asked to do: the options, kept beside its checkpoint as `run.json`, so that it can be built again."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from prunus.errors import ArtefactError
from prunus.files import read_json, write_json

SCHEMA = 1
FILE = "run.json"


@dataclass(frozen=True)
class Job:
    """A run as the command line was asked for it.

    Args:
        model, data: names, as the options take them.
        budgets: as they were written.
        settings: of `prunus.train.Settings`: those that were given, and all of them in a run's folder.
        units, only, freeze: what gets gates (`prunus.gate`).
        form: of the shrunk model.
        inputs: the shape of example inputs ("2x3x32x32"), if given.
        baseline: train the dense model too.
        demo: the embedded demo, which may overwrite itself.
        dense: the dense model's metric, once it was measured.
    """

    model: str = ""
    data: str = ""
    budgets: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    units: str = "structured"
    only: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    form: str = "auto"
    inputs: str | None = None
    baseline: bool = False
    demo: bool = False
    dense: float | None = None

    @property
    def title(self) -> str:
        """What it is about, in a few words."""
        return f"{self.model} on {self.data}, {', '.join(self.budgets)}"

    def with_options(self, given: Mapping[str, Any], settings: Mapping[str, Any]) -> "Job":
        """The same job with some options given otherwise."""
        return replace(self, **given, settings={**self.settings, **settings})

    def save(self, checkpoint: Path) -> None:
        """Write it beside the checkpoint."""
        write_json(checkpoint / FILE, {"schema": SCHEMA, **asdict(self)})

    @classmethod
    def load(cls, checkpoint: Path) -> "Job":
        """Read it back.

        Raises:
            ArtefactError: there is none, or it is damaged.
        """
        path = checkpoint / FILE
        value = read_json(path, "description of a run")
        kinds: dict[str, Any] = {
            "settings": dict, "baseline": bool, "demo": bool, "dense": float | int | None, "inputs": str | None,
            "budgets": list, "only": list, "freeze": list,
        }  # fmt: skip
        if not isinstance(value, dict) or value.pop("schema", None) != SCHEMA:
            raise ArtefactError(f"{path} is of another version (this Prunus reads schema {SCHEMA}).")
        for name in (f.name for f in fields(cls)):
            if name not in value or not isinstance(value[name], kinds.get(name, str)):
                raise ArtefactError(f"{path} is damaged: its entry {name!r} is missing or wrong.")
        for name in ("budgets", "only", "freeze"):
            value[name] = tuple(map(str, value[name]))
        return cls(**{f.name: value[f.name] for f in fields(cls)})


DEMO = Job(
    model="mlp",
    data="digits",
    budgets=("params=10%",),
    settings={"epochs": 100, "batch_size": 32},
    baseline=True,
    demo=True,
)


def differences(old: Job, new: Job) -> list[tuple[str, str, str]]:
    """What two jobs do differently, as (option, old, new)."""
    found = []
    for name in ("model", "data", "budgets", "units", "only", "freeze", "inputs"):
        a, b = getattr(old, name), getattr(new, name)
        if name == "budgets":
            a, b = _budgets(a), _budgets(b)
        if a != b:
            option = {"budgets": "budget", "inputs": "input"}.get(name, name)
            found.append((f"--{option}", _written(a), _written(b)))
    for name in dict.fromkeys([*old.settings, *new.settings]):
        a, b = (job.settings.get(name) for job in (old, new))
        if a != b:
            found.append((f"--{name.replace('_', '-')}", _written(a), _written(b)))
    return found


def _budgets(texts: Sequence[str]) -> tuple[str, ...]:
    from prunus.budget import parse

    return tuple(map(str, parse(texts)))


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)
