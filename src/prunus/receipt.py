"""The receipt: measured facts about a shrunk model. `docs/design.md` documents its keys; `schema` is their version."""

import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunus.axes import Keep
from prunus.errors import InexactSurgery
from prunus.files import read_json, write_json
from prunus.gated import Gated
from prunus.measure import count_bytes, count_macs, count_params, evaluating, latencies, with_batch
from prunus.surgery import Inputs

SCHEMA = 1


class Receipt(dict[str, Any]):
    """A receipt as a dictionary that prints as a table and saves as JSON."""

    def save(self, path: str | Path) -> None:
        """Write it, whole or not at all."""
        write_json(Path(path), dict(self))

    @classmethod
    def load(cls, path: str | Path) -> "Receipt":
        """Read one back."""
        return cls(read_json(Path(path), "receipt"))

    def __str__(self) -> str:
        dense, small = self["dense"], self["deployed"]
        lines = [f"{'':12}{'dense':>14}{'deployed':>14}{'kept':>9}"]
        for what in ("params", "macs", "bytes"):
            lines.append(f"{what:12}{dense[what]:>14,}{small[what]:>14,}{small[what] / max(1, dense[what]):>9.2%}")
        for batch in small["latency_ms"]:
            a, b = dense["latency_ms"][batch]["median"], small["latency_ms"][batch]["median"]
            lines.append(f"{f'ms, batch {batch}':12}{a:>14.3f}{b:>14.3f}" + (f"{a / b:>9.2f}x as fast" if b else ""))
        for b in self["budgets"]:
            where = f"layer:{b['where']}:" if b["where"] else ""
            verdict = "met" if b["met"] else "MISSED"
            numbers = [
                f"{b[key]:,.4g}" if b["what"] == "density" else f"{b[key]:,.0f}" for key in ("limit", "deployed")
            ]
            lines.append(f"budget {where}{b['what']} <= {numbers[0]}: deployed {numbers[1]}, {verdict}")
        e = self["exactness"]
        form = {"eager": "in the model's own code", "graph": "as its exported operations"}[self["form"]]
        lines.append(f"equal to the gated model within {e['max_rel_diff']:.1e} ({e['inputs']} inputs), {form}")
        return "\n".join(lines)


def versions() -> dict[str, str]:
    """What this ran on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("prunus", "cooper-optim", "accelerate", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def facts(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Parameters, MACs and bytes, counted on the module itself."""
    return {
        "params": count_params(model),
        "macs": count_macs(model, inputs.args, inputs.kwargs),
        "bytes": count_bytes(model),
    }


def times(models: Mapping[str, nn.Module], inputs: Inputs, batches: Sequence[int], seconds: float) -> dict[str, Any]:
    """Latency by model and batch size, the models taking turns. Batch sizes a model cannot run are left out."""
    result: dict[str, Any] = {name: {} for name in models}
    device = next(iter(models.values()), nn.Module())
    where = next((p.device for p in device.parameters()), None)
    with evaluating(*models.values()):
        for batch in batches:
            args, kwargs = with_batch(inputs.args, batch, inputs.kwargs)
            calls = {name: _call(model, args, kwargs) for name, model in models.items()}
            try:
                measured = latencies(calls, seconds, where)
            except Exception:  # sizes or indices that only fit the example's batch
                continue
            for name, value in measured.items():
                result[name][str(batch)] = value
    return result


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: model(*args, **kwargs)


def build(
    gated: Gated,
    small: nn.Module,
    keep: Keep,
    exactness: Mapping[str, Any],
    inputs: Inputs,
    *,
    batches: Sequence[int],
    seconds: float,
    metric: Mapping[str, Any] | None,
    run: Mapping[str, Any] | None,
    form: str,
) -> Receipt:
    """Measure everything and write it down.

    Raises:
        InexactSurgery: what is counted on the shrunk module is not what the cost function said.
    """
    dense, deployed = facts(gated.model, inputs), facts(small, inputs)
    said = gated.cost.of(keep)
    if gated.graph.scattered:
        deployed = dict(said)  # the zeros are still stored in the module; the file holds values and places
    wrong = [what for what, value in said.items() if value != deployed[what]]
    if wrong:
        raise InexactSurgery(
            f"The cost function says {said[wrong[0]]:,} {wrong[0]} and the shrunk model has {deployed[wrong[0]]:,}: "
            "please report this model."
        )
    latency = times({"dense": gated.model, "deployed": small}, inputs, batches, seconds)
    readings = gated.budget.readings() if gated.budget is not None else []
    keys = ("what", "where", "limit", "expected", "deployed", "paper", "met")
    kept = keep.kept()
    return Receipt(
        schema=SCHEMA,
        dense={**dense, "latency_ms": latency["dense"]},
        deployed={**deployed, "latency_ms": latency["deployed"]},
        budgets=[{key: reading[key] for key in keys} for reading in readings],
        groups={name: {"size": size, "kept": kept[name]} for name, size in gated.graph.sizes.items()},
        form=form,
        exactness=dict(exactness),
        metric=dict(metric) if metric else None,
        run={
            "seed": None,
            "seconds": None,
            "device": str(gated.log_alpha.device),
            "versions": versions(),
            "epochs": None,
            "method": "l0",
            "round_to": gated.round_to,
            "landing": gated.landing or {"closed": 0},
            **(run or {}),
        },
    )
