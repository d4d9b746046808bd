"""From a run to its results: train, shrink, and write the artefact, the receipt and the end of the record."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from prunus.data import Batches, Dataset
from prunus.errors import RunFailed
from prunus.front import shrink
from prunus.receipt import Receipt, versions
from prunus.record import SCHEMA, Writer
from prunus.surgery.artefact import save
from prunus.train.average import Average
from prunus.train.loop import Run
from prunus.train.metric import accuracy
from prunus.train.progress import Progress
from prunus.train.settings import Settings


@dataclass(frozen=True)
class Result:
    """What a run gives back."""

    small: nn.Module
    receipt: Receipt
    out: Path


def fit(run: Run, *, resume: bool = False, dense: float | None = None) -> Result:
    """Train a run to its budget, land, polish, shrink, and write the artefact and the receipt.

    Args:
        run: a fresh run.
        resume: go on from the checkpoint in its folder.
        dense: the dense model's metric, if it was measured.
    """
    keep_bytes = run.restore() if resume else None
    for stale in ("receipt.json", "small.safetensors"):
        (run.out / stale).unlink(missing_ok=True)  # of an earlier run: it would speak of another network
    settings, gated = run.settings, run.gated
    with Writer(run.out / "log.jsonl", keep_bytes) as log, run.progress.running(settings, run.budget):
        if not resume:
            log.write("start", **_start(run))
        try:
            run.train(log)
        except RunFailed as error:
            log.write("warning", message=str(error))
            raise
        run.progress.say("shrinking")
        small, receipt = shrink(
            gated,
            run.inputs,
            evaluate=lambda network: accuracy(network, run.data.test_x, run.data.test_y),
            metric={"name": "accuracy", "dense": dense},
            run={
                "seed": settings.seed,
                "seconds": round(run.seconds, 3),
                "device": _device_name(run.device),
                "epochs": settings.epochs,
                "method": settings.method,
            },
        )
        if not all(budget["met"] for budget in receipt["budgets"]):
            raise RunFailed(
                "The run ended above its budget, which the landing should make impossible: please report it."
            )
        save(small, run.out / "small.safetensors")
        receipt.save(run.out / "receipt.json")
        log.write("end", seconds=run.seconds, receipt=dict(receipt))
    return Result(small, receipt, run.out)


def fit_dense(
    model: nn.Module, data: Dataset, settings: Settings, device: torch.device, progress: Progress | None = None
) -> float:
    """Train the dense model by the same recipe without gates; gives its test accuracy, to compare with."""
    data = data.to(device)
    torch.manual_seed(settings.seed)
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.weight_lr, weight_decay=0.0)
    batches = Batches(data.train_x, data.train_y, settings.batch_size, seed=settings.seed)
    average = Average(model.parameters(), settings.ema) if settings.ema is not None else None
    model.train()
    tick: Callable[[float], None] = progress.baseline(settings.epochs) if progress else lambda epoch: None
    for epoch in range(settings.epochs):
        for k, (x, y) in enumerate(batches):
            optimizer.param_groups[0]["lr"] = settings.weight_lr * settings.scale("weight", epoch + k / len(batches))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if average is not None:
                average.update()
        tick(epoch + 1)
    if average is not None:
        average.take()
    return accuracy(model, data.test_x, data.test_y)


def _start(run: Run) -> dict[str, Any]:
    settings = run.settings
    return {
        "schema": SCHEMA,
        "model": run.names[0],
        "data": run.names[1],
        "seed": settings.seed,
        "device": _device_name(run.device),
        "epochs": settings.epochs,
        "steps_per_epoch": run.steps_per_epoch,
        "method": settings.method,
        "settings": {**settings.as_dict(), "dual_rate": run.budget.dual_rate, "gate_lr": run.base_rates["gate"]},
        "versions": versions(),
        "dense": run.gated.cost.dense(),
        "budgets": [{k: reading[k] for k in ("what", "where", "limit", "dense")} for reading in run.budget.readings()],
        "groups": [{"name": g.name, "size": g.size, "unit": g.unit} for g in run.gated.graph.groups],
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
