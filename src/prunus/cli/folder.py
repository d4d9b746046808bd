"""A run's folder: what may lie there before a run begins, and what stays if it does not."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from prunus.cli.job import FILE, Job
from prunus.errors import ArtefactError, OutputError
from prunus.files import writable_folder
from prunus.record import read
from prunus.train import checkpoint

LOCK = ".lock"
INSIDE = {"checkpoint": (FILE, checkpoint.NAME, ".*.part"), "plots": ("*.png", "*.svg", ".*.part")}
MADE = ("receipt.json", "small.safetensors", "report.html", "log.jsonl", "checkpoint", "plots")


class Folder:
    """The folder that a run is to write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise OutputError(f"The output folder {path} is a file; give another one with --out.")
        self.checkpoint = path / "checkpoint"
        self.touched = False
        self.held = [name for name in MADE if (path / name).exists() or (path / name).is_symlink()]

    @property
    def started(self) -> bool:
        """Has a run begun here?"""
        return (self.checkpoint / FILE).is_file() or self.saved

    @property
    def saved(self) -> bool:
        """Is there a checkpoint to go on from?"""
        return (self.checkpoint / checkpoint.NAME).is_file()

    @property
    def finished(self) -> bool:
        """Did the run here come to its end?"""
        try:
            ended = read(self.path / "log.jsonl")[-1:]
        except ArtefactError:
            return False
        return bool(ended) and ended[0]["kind"] == "end" and (self.path / "receipt.json").is_file()

    def job(self) -> Job:
        """What the run here was asked to do."""
        if (self.checkpoint / FILE).is_file() or not self.saved:
            return Job.load(self.checkpoint)
        _, facts = checkpoint.read(self.checkpoint)  # of a run that Python code made
        try:
            model, data = map(str, facts["names"])
            budgets = tuple(text.replace(",", "") for text in facts["budgets"])
            settings = dict(facts["settings"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtefactError(f"The checkpoint in {self.path} does not say what it was made for.") from error
        return Job(model, data, budgets, settings)

    def refuse_other(self, job: Job) -> None:
        """Refuse to mix with, or to overwrite, what lies here.

        Raises:
            OutputError: there is a run here, or files that go by the names of one.
        """
        if (self.path / LOCK).exists():
            with self.alone():
                pass
        if not self.held:
            return
        try:
            there = self.job() if self.started else None
        except ArtefactError:
            there = None
        if there is not None and (there.demo and job.demo):
            return
        if there is not None and not self.saved and not (self.path / "receipt.json").exists():
            return  # it was ended before its first epoch was: nothing is lost
        elsewhere = "Give another folder with --out, or replace it with --overwrite."
        if there is None:
            raise OutputError(f"The output folder {self.path} holds {self.held[0]} already. {elsewhere}")
        if self.finished:
            raise OutputError(f"The output folder {self.path} holds a finished run ({there.title}). {elsewhere}")
        raise OutputError(
            f"The output folder {self.path} holds a run that is not finished ({there.title}). Go on with --resume, "
            "give another folder with --out, or start anew with --overwrite."
        )

    def clear(self) -> None:
        """Remove what an earlier run wrote, and nothing else."""
        for name in MADE:
            path = self.path / name
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
                continue
            for pattern in INSIDE[name]:
                for file in path.glob(pattern):
                    file.unlink(missing_ok=True)
            if not any(path.iterdir()):
                path.rmdir()
        for path in self.path.glob(".*.part"):  # of a run that was killed while it wrote
            path.unlink(missing_ok=True)

    @contextmanager
    def nothing_half_done(self) -> Iterator[None]:
        """If a run fails or is interrupted before it has a checkpoint, remove what it wrote and the folders it made."""
        new = [path for path in [self.path, *self.path.absolute().parents] if not path.exists()]
        try:
            yield
        except BaseException:
            if self.touched and not self.saved:
                self.clear()
            for path in new:
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
            raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs out of the folder while one is at work there."""
        writable_folder(self.path)
        lock = filelock.FileLock(self.path / LOCK, timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise OutputError(
                f"Another run is at work in {self.path}; give this one another folder with --out."
            ) from error
        try:
            yield
        finally:
            (self.path / LOCK).unlink(missing_ok=True)
            lock.release()

    def begin(self, job: Job) -> None:
        """Take the folder for a job: remove what was there, write down what is to be done."""
        self.touched = True
        self.clear()
        job.save(self.checkpoint)
