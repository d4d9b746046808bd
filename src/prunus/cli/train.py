"""`prunus train`: check everything, train, and show what came out."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunus import data as datasets
from prunus import report
from prunus.budget import parse
from prunus.cli import speech, tables
from prunus.cli.folder import Folder
from prunus.cli.job import DEMO, Job, differences
from prunus.cli.sources import device_of, model_and_inputs
from prunus.errors import ArtefactError, OutputError, PrunusError
from prunus.receipt import Receipt
from prunus.train import Progress, Run, Settings, fit, fit_dense, one_process


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Settings from the options that were given, or from a run's folder."""
    try:
        return Settings(**values)
    except PrunusError as error:
        option = re.sub(r"^The setting (\w+)", lambda found: "--" + found[1].replace("_", "-"), str(error))
        raise PrunusError(option) from error
    except TypeError as error:
        raise ArtefactError(f"The run was made by another version of Prunus: {error}.") from error


def build(job: Job, out: Path, device: str | None, progress: Progress | None = None) -> tuple[Run, nn.Module]:
    """Make everything a job needs, which checks it; gives the run, and a dense model like the one that got gates."""
    lines = parse(job.budgets)
    settings = settings_of(job.settings)
    device = device_of(device)
    data = datasets.load(job.data)
    model, inputs = model_and_inputs(job.model, settings.seed, data, job.inputs)
    dense = model_and_inputs(job.model, settings.seed, data, job.inputs)[0] if job.baseline else model
    run = Run(
        model,
        inputs,
        data,
        lines,
        settings,
        out,
        device=device,
        names=(job.model, job.data),
        progress=progress,
        gate_options={"units": job.units, "only": job.only, "freeze": job.freeze, "form": job.form},
    )
    return run, dense


def requested(given: Mapping[str, Any], settings: Mapping[str, Any]) -> Job:
    """The job that the options ask for; without a model, data or budget it is the embedded demo."""
    if not any(given.get(name) for name in ("model", "data", "budgets")):
        return DEMO.with_options(given, settings)
    job = Job().with_options(given, settings)
    missing = [f"--{name}" for name, value in (("model", job.model), ("data", job.data)) if not value]
    if not job.budgets:
        missing.append("--budget")
    if missing:
        raise PrunusError(
            f"{' and '.join(missing)} must be given too, such as: prunus train --model lenet5 --data mnist --budget "
            "params=10%. Without any of the three the embedded demo is run."
        )
    return job if "baseline" in given else replace(job, baseline=job.data == "digits")


def place(out: Path | None, job: Job) -> Path:
    """Where a job's results go unless the user says."""
    if out is not None:
        return out
    names = ["demo"] if job.demo else [name.replace(":", ".") for name in (job.model, job.data)]
    return Path("runs") / "-".join(names)


def train(
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    out: Path | None,
    device: str | None,
    resume: bool,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Run the command; `given` and `settings` hold the options that were given, and no others."""
    one_process()
    if resume and overwrite:
        raise PrunusError("--resume goes on with a run and --overwrite starts it anew; give one of them.")
    if settings.get("ema") == 0:
        settings = {**settings, "ema": None}
    # All that a resumed run is not told again is its own; it is looked up in the folder below.
    job = Job() if resume and out is not None else requested(given, settings)
    settings_of({**job.settings, **settings})
    if given.get("budgets") or job.budgets:
        parse(given.get("budgets") or job.budgets)
    folder = Folder(place(out, job))
    if resume:
        job = _resumed(folder, given, settings)
        if folder.finished:
            _already(folder, job, quiet)
            return
    elif not overwrite:
        folder.refuse_other(job)
    progress = Progress(quiet=quiet)
    with folder.nothing_half_done(), folder.alone(), speech.plain_warnings(progress.warn):
        run, dense = build(job, folder.path, device, progress)
        going_on = resume and folder.saved
        if not quiet:
            speech.note(tables.headline(run, job.title, going_on), progress.console)
        job = replace(job, settings=run.settings.as_dict())
        try:
            receipt = _work(run, dense, job, folder, going_on)
        except KeyboardInterrupt:
            raise speech.Interrupted(_farewell(folder)) from None
        finally:
            progress.close()
    if not quiet:
        tables.show(receipt, job.title, folder.path)


def _work(run: Run, dense: nn.Module, job: Job, folder: Folder, going_on: bool) -> Receipt:
    """Train the dense twin if asked, then the run; write the report."""
    if not going_on:
        folder.begin(job)
    if job.baseline and job.dense is None:
        with torch.random.fork_rng():  # the run draws the same numbers with and without its dense twin
            job = replace(job, dense=fit_dense(dense, run.data, run.settings, run.device, run.progress))
        job.save(folder.checkpoint)
    result = fit(run, resume=going_on, dense=job.dense)
    try:
        report.write([folder.path], folder.path / "report.html")
    except OutputError as error:
        raise OutputError(
            f"{error} The run itself is finished, but for its report; `prunus report {folder.path}` writes that."
        ) from error
    return result.receipt


def _resumed(folder: Folder, given: Mapping[str, Any], settings: Mapping[str, Any]) -> Job:
    """The job that a folder's run was given, if what is asked for now is the same."""
    if not folder.started:
        raise ArtefactError(
            f"There is no run in {folder.path} to resume; give its folder with --out, or leave --resume out to start "
            "anew."
        )
    there = folder.job()
    now = there.with_options({k: v for k, v in given.items() if k != "baseline"}, settings)
    for option, old, new in differences(there, now):
        raise ArtefactError(
            f"The run in {folder.path} was made with {option} {old}, not {new}; resume it with the same, or start anew "
            "with --overwrite or in another folder."
        )
    return there


def _already(folder: Folder, job: Job, quiet: bool) -> None:
    """Say that a run is finished; a report that was not written for want of time is."""
    if not (folder.path / "report.html").exists():
        report.write([folder.path], folder.path / "report.html")
    if not quiet:
        speech.note(f"The run in {folder.path} ({job.title}) is finished already: there is nothing to resume.")


def _farewell(folder: Folder) -> str:
    if folder.saved:
        return f"Interrupted. The last finished epoch is kept in {folder.path}: the same command with --resume goes on."
    return "Interrupted before the first epoch was finished: nothing is kept."
