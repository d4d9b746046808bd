"""Stopped and resumed, a run ends on the same bits as if nothing had happened; what cannot go on is refused."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_shell import call
from safetensors.torch import save_file
from torch import nn
from train_toys import CLASSES, FEATURES, Net, make, of_kind, receipt_of, toy_data, untimed

from prunus.errors import ArtefactError, DataError
from prunus.record import Writer, read
from prunus.train import Progress, Run, checkpoint, fit

EPOCHS = 5
BUDGETS = ("params=50%", "layer:fc2:macs=60%")
RUN: dict[str, Any] = {"epochs": EPOCHS, "polish": 0.4, "weight_lr": 0.02, "gate_lr": 0.1, "log_every": 2}


class Copied(Run):
    """A run that keeps a copy of its folder as it stood after every epoch's checkpoint."""

    def save_checkpoint(self, log: Writer) -> None:
        super().save_checkpoint(log)
        shutil.copytree(self.out, self.out.with_name(f"after{self.epoch}"))


def ends_equal(one: Path, other: Path) -> None:
    assert (one / "small.safetensors").read_bytes() == (other / "small.safetensors").read_bytes()
    assert untimed(receipt_of(one)) == untimed(receipt_of(other))
    assert untimed(read(one / "log.jsonl")) == untimed(read(other / "log.jsonl"))
    (a, a_facts), (b, b_facts) = (checkpoint.read(folder / "checkpoint") for folder in (one, other))
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    changing = ("seconds", "log_bytes", "digest")  # as long as the seconds are written
    assert {k: v for k, v in a_facts.items() if k not in changing} == {
        k: v for k, v in b_facts.items() if k not in changing
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"polish": 0.0},
        {"ema": 0.9},
        {"ema": 0.9, "polish": 0.0},
        {"extrapolate": True},
        {"extrapolate": True, "polish": 0.0},
        {"polish_noise": True},
        {"accumulate": 2},
        {"per_example": True},
        {"dual": "expected", "restarts": False, "warm_up": 0.0},
        {"ema": 0.9, "extrapolate": True, "polish_noise": True, "accumulate": 2, "per_example": True},
    ],
    ids=str,
)
def test_from_the_end_of_every_epoch_it_goes_on_to_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    fit(make(tmp_path / "whole", BUDGETS, kind=Copied, **RUN | settings))
    for epoch in range(1, EPOCHS + 1):
        folder = tmp_path / f"after{epoch}"
        assert read(folder / "log.jsonl")[-1]["kind"] in ("epoch", "warning")
        torch.manual_seed(epoch)  # another process, another history of random numbers
        torch.rand(epoch)
        resumed = make(folder, BUDGETS, model=Net(seed=7), **RUN | settings)
        fit(resumed, resume=True)
        assert resumed.step == EPOCHS * resumed.steps_per_epoch
        ends_equal(tmp_path / "whole", folder)


class Stop(Exception):
    """What stops a run in these tests."""


class Stopping(Progress):
    """Progress that stops the run after some epoch: what was logged since the checkpoint is not to be kept."""

    def __init__(self, epoch: int | None = None, saying: str | None = None) -> None:
        super().__init__(quiet=True)
        self.at, self.saying = epoch, saying

    def epoch(self, epoch: int, *rest: Any) -> None:
        if epoch == self.at:
            raise Stop

    def say(self, what: str) -> None:
        if what == self.saying:
            raise Stop


@pytest.mark.parametrize("settings", [{"ema": 0.9, "polish_noise": True}, {"extrapolate": True}], ids=str)
def test_stopped_again_and_again_between_checkpoints_it_ends_on_the_same_bits(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    fit(make(tmp_path / "whole", BUDGETS, **RUN | settings))
    folder = tmp_path / "stopped"
    for number, epoch in enumerate(range(2, EPOCHS + 1)):
        run = make(folder, BUDGETS, progress=Stopping(epoch), **RUN | settings)
        with pytest.raises(Stop):
            fit(run, resume=number > 0)
        assert [line["epoch"] for line in of_kind(read(folder / "log.jsonl"), "epoch")] == list(range(1, epoch + 1))
        assert checkpoint.read(folder / "checkpoint")[1]["epoch"] == epoch - 1
    with pytest.raises(Stop):
        fit(make(folder, BUDGETS, progress=Stopping(saying="shrinking"), **RUN | settings), resume=True)
    assert not (folder / "receipt.json").exists()
    fit(make(folder, BUDGETS, **RUN | settings), resume=True)
    ends_equal(tmp_path / "whole", folder)


def test_a_half_written_line_of_the_log_does_not_hinder(tmp_path: Path) -> None:
    fit(make(tmp_path / "whole", BUDGETS, kind=Copied, **RUN))
    with open(tmp_path / "after3" / "log.jsonl", "a") as log:
        log.write('{"kind":"step","st')
    fit(make(tmp_path / "after3", BUDGETS, **RUN), resume=True)
    ends_equal(tmp_path / "whole", tmp_path / "after3")


def test_time_that_was_spent_is_counted_on(tmp_path: Path) -> None:
    fit(make(tmp_path / "whole", BUDGETS, kind=Copied, **RUN))
    spent = [line["seconds"] for line in of_kind(read(tmp_path / "whole" / "log.jsonl"), "epoch")]
    fit(make(tmp_path / "after4", BUDGETS, **RUN), resume=True)
    again = [line["seconds"] for line in of_kind(read(tmp_path / "after4" / "log.jsonl"), "epoch")]
    assert again[:4] == spent[:4]
    assert again[4] > spent[3]


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """A checkpoint that lost one thing a run needs leads elsewhere."""
    fit(make(tmp_path / "whole", BUDGETS, kind=Copied, **RUN))
    tensors, facts = checkpoint.read(tmp_path / "after2" / "checkpoint")
    facts = {key: value for key, value in facts.items() if key not in ("schema", "digest")}
    for name in ("random.cpu", "batches.generator", "budget.multiplier", "gated.model.norm.running_mean",
                 "optimizer.0.exp_avg_sq", "optimizer.8.step", "gated.log_alpha"):  # fmt: skip
        folder = tmp_path / name
        shutil.copytree(tmp_path / "after2", folder)
        run = make(folder, BUDGETS, **RUN)
        other = torch.Generator().manual_seed(99).get_state() if tensors[name].dtype == torch.uint8 else None
        checkpoint.write(
            folder / "checkpoint", tensors | {name: tensors[name] * 0.5 if other is None else other}, facts
        )
        fit(run, resume=True)
        with pytest.raises(AssertionError):
            ends_equal(tmp_path / "whole", folder)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its third epoch, that nobody may change."""
    folder = tmp_path_factory.mktemp("stopped") / "whole"
    fit(make(folder, BUDGETS, kind=Copied, **RUN))
    return folder.with_name("after3")


@pytest.fixture
def copied(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "run" / "receipt.json").write_text("of an earlier run")
    return tmp_path / "run"


def refused(run: Run, error: type[Exception], message: str) -> None:
    """It is refused, and nothing has been touched."""
    before = {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()}
    with pytest.raises(error, match=message):
        fit(run, resume=True)
    assert {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "name, value",
    [("seed", 1), ("weight_lr", 0.03), ("epochs", 6), ("batch_size", 16), ("ema", 0.9), ("polish", 0.2),
     ("per_example", True), ("round_to", 2), ("accumulate", 2), ("dual_rate", 0.5), ("extrapolate", True),
     ("log_every", 3)],
)  # fmt: skip
def test_other_settings_are_refused_by_name(copied: Path, name: str, value: Any) -> None:
    run = make(copied, BUDGETS, **RUN | {name: value})
    refused(run, ArtefactError, f"was made with {name}=.*, not {value}; .*without --resume")


@pytest.mark.parametrize(
    "budgets", [("params=40%", "layer:fc2:macs=60%"), ("params=50%",), (*BUDGETS, "bytes=50%"), BUDGETS[::-1]], ids=str
)
def test_other_budgets_are_refused(copied: Path, budgets: tuple[str, ...]) -> None:
    refused(make(copied, budgets, **RUN), ArtefactError, "was made for params=50%, layer:fc2:macs=60%, not for")


def test_another_model_is_refused_by_the_name_of_a_tensor(copied: Path) -> None:
    wider = nn.Sequential()
    wider.fc1, wider.fc2 = nn.Linear(FEATURES, 13), nn.Linear(13, CLASSES)
    run = make(copied, BUDGETS, model=wider, **RUN)
    refused(run, ArtefactError, r"belongs to another model: for 'log_alpha' .*\(26,\)")


def test_other_data_is_refused(copied: Path) -> None:
    refused(make(copied, BUDGETS, data=toy_data(train=143), **RUN), DataError, "of 144 samples, but there are 143")


def test_a_log_that_was_cut_is_refused(copied: Path) -> None:
    log = copied / "log.jsonl"
    whole = log.read_bytes()
    for left in (whole[:-1], whole[: len(whole) // 2], b"", None):
        log.unlink() if left is None else log.write_bytes(left)
        with pytest.raises(ArtefactError, match="is gone or was cut"):
            fit(make(copied, BUDGETS, **RUN), resume=True)
        assert (log.read_bytes() if log.exists() else None) == left
    log.write_bytes(whole)
    fit(make(copied, BUDGETS, **RUN), resume=True)


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage_bit(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-3] ^= 16
    path.write_bytes(whole)


def damage_other(path: Path) -> None:
    save_file({"a": torch.zeros(3)}, path)


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_cut, damage_bit, damage_other, damage_empty])
def test_a_damaged_checkpoint_is_refused(copied: Path, damage: Callable[[Path], None]) -> None:
    run = make(copied, BUDGETS, **RUN)
    damage(copied / "checkpoint" / checkpoint.NAME)
    refused(run, ArtefactError, "damaged")


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="no checkpoint at"):
        fit(make(tmp_path, BUDGETS, **RUN), resume=True)


# ---- killed for good -------------------------------------------------------------------------------------------------


WORDS = (
    "train", "--model", "mlp", "--data", "digits", "--budget", "params=30%", "--epochs", "10", "--batch-size", "64",
    "--polish-noise", "--log-every", "1", "--device", "cpu", "--no-baseline", "--quiet",
)  # fmt: skip


def test_killed_within_an_epoch_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    said = call(*WORDS, "--out", whole)
    assert said.code == 0, said.err
    process = subprocess.Popen(
        [sys.executable, "-m", "prunus", *WORDS, "--out", killed],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    steps = random.Random(time.time_ns()).randrange(30, 180)  # of 230; the landing comes after 161
    log = killed / "log.jsonl"
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        if log.exists() and log.read_bytes().count(b'"kind":"step"') >= steps:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, error
    assert not (killed / "receipt.json").exists()
    saved = checkpoint.read(killed / "checkpoint")[1]
    assert saved["step"] == 23 * saved["epoch"] > 0
    assert len(of_kind(read(log), "step")) >= steps
    said = call("train", "--resume", "--quiet", "--out", killed, "--device", "cpu")
    assert said.code == 0, said.err
    assert (whole / "small.safetensors").read_bytes() == (killed / "small.safetensors").read_bytes(), steps
    assert untimed(receipt_of(whole)) == untimed(receipt_of(killed)), steps
    assert untimed(read(whole / "log.jsonl")) == untimed(read(log)), steps
    assert len(of_kind(read(log), "step")) == 230
