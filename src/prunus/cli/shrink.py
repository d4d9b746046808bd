"""`prunus shrink`: from a run's checkpoint to its small model and receipt, without training on."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prunus.cli import speech, tables
from prunus.cli.folder import Folder
from prunus.cli.train import build
from prunus.errors import ArtefactError
from prunus.front import shrink as shrink_gated
from prunus.receipt import Receipt
from prunus.surgery.artefact import save
from prunus.train import accuracy


def shrink(path: Path, given: Mapping[str, Any], device: str | None) -> None:
    """Run the command; `given` holds the options that say what the checkpoint does not."""
    folder = Folder(path)
    if not folder.saved:
        raise ArtefactError(f"There is no run with a checkpoint in {path}; give the folder that `prunus train` wrote.")
    job = replace(folder.job(), **given, baseline=False)
    if not job.model or not job.data:
        raise ArtefactError(f"The checkpoint in {path} does not name its model and data; give --model and --data.")
    with folder.alone():
        run, _ = build(job, path, device)
        run.restore()
        run.settle()
        small, receipt = shrink_gated(
            run.gated,
            run.inputs,
            evaluate=lambda network: accuracy(network, run.data.test_x, run.data.test_y),
            metric={"name": "accuracy", "dense": job.dense},
            run={
                "seed": run.settings.seed,
                "seconds": round(run.seconds, 3),
                "device": str(run.device),
                "epochs": run.epoch,
                "method": run.settings.method,
            },
        )
        save(small, path / "small.safetensors")
        receipt.save(path / "receipt.json")
    title = job.title
    if run.epoch < run.settings.epochs:
        speech.note(
            f"The run stands at epoch {run.epoch} of {run.settings.epochs}: this is what it would deploy now. "
            "prunus train --resume goes on."
        )
    tables.show(Receipt(receipt), title, path)
