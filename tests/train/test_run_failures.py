"""Runs that diverge, and models and folders that cannot be trained with."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_toys import CLASSES, FEATURES, STEPS, Net, make, of_kind, tensors, toy_data, trained

from prunus.errors import ModelError, OutputError, PrunusError, RunFailed
from prunus.record import read
from prunus.train import Run, checkpoint, fit, one_process


class Poisoned(Net):
    """Gives NaN from the given call in training mode on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if torch.compiler.is_exporting() or not self.training:
            return result
        self.calls += 1
        return result * math.nan if self.calls > self.at else result


def poisoned(folder: Path, at: int, **settings: Any) -> Run:
    model = Poisoned(10**9)
    run = make(folder, model=model, epochs=4, **settings)
    model.at, model.calls = at, 0
    return run


@pytest.mark.parametrize("log_every", [1, 10**6])
def test_a_loss_that_turns_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path, log_every: int) -> None:
    run = poisoned(tmp_path, 2 * STEPS + 1, log_every=log_every)  # at the second step of the third epoch
    at = 2 * STEPS + 2 if log_every == 1 else 3 * STEPS
    with pytest.raises(RunFailed) as caught:
        trained(run)
    sentence = str(caught.value)
    for words in (
        "nan",
        "epoch 3,",
        f"step {at}:",
        "checkpoint of epoch 2 is kept",
        "0.001",
        "0.5 for the gates",
        "learning rates",
    ):
        assert words in sentence, sentence
    assert caught.value.exit_code == 3
    kept, facts = checkpoint.read(tmp_path / "checkpoint")
    assert facts["epoch"] == 2
    assert all(torch.isfinite(value).all() for value in kept.values() if value.is_floating_point())
    good = make(tmp_path / "good", epochs=4, log_every=log_every)
    good.save_checkpoint = lambda log: states.append(tensors(good))  # type: ignore[method-assign]
    states: list[dict[str, Tensor]] = []
    trained(good)
    for name, value in states[1].items():
        if name not in ("log_alpha", "lambda"):
            assert torch.equal(kept[f"gated.model.{name}"], value)
    assert [line["epoch"] for line in of_kind(read(tmp_path / "log.jsonl"), "epoch")] == [1, 2]


def test_a_loss_that_is_nan_at_once_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"epoch 1, .*No epoch was finished"):
        trained(poisoned(tmp_path, 0))
    assert not (tmp_path / "checkpoint").exists()


def test_weights_that_turned_infinite_in_an_epochs_last_step_do_not_replace_a_good_checkpoint(tmp_path: Path) -> None:
    """The loss of the last step was finite still: it was computed before the step."""
    run = make(tmp_path, epochs=4)
    inner, calls = run.budget.step, []

    def step() -> None:
        inner()
        calls.append(None)
        if len(calls) == 3 * STEPS:
            run.gated.model.fc3.weight.data[0, 0] = math.inf

    run.budget.step = step  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match="checkpoint of epoch 2 is kept"):
        trained(run)
    kept, facts = checkpoint.read(tmp_path / "checkpoint")
    assert facts["epoch"] == 2
    assert all(torch.isfinite(value).all() for value in kept.values() if value.is_floating_point())


class Shaped(nn.Module):
    """A linear layer whose scores are given some other form."""

    def __init__(self, form: Any, outputs: int = CLASSES) -> None:
        super().__init__()
        self.fc1, self.fc2, self.form = nn.Linear(FEATURES, 8), nn.Linear(8, outputs), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.fc2(self.fc1(x).relu()))


@pytest.mark.parametrize(
    "form, outputs, message",
    [
        (lambda s: s.unsqueeze(1), CLASSES, r"returns \(2, 1, 3\); .* one row of class scores"),
        (lambda s: s.sum(1), CLASSES, r"returns \(2,\)"),
        (lambda s: (s, s), CLASSES, "returns tuple"),
        (lambda s: {"scores": s}, CLASSES, "returns dict"),
        (lambda s: s, 2, "tells 2 classes apart, the data toy has 3"),
    ],
)
def test_a_model_that_returns_no_class_scores_is_refused(tmp_path: Path, form: Any, outputs: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, model=Shaped(form, outputs))


def test_a_model_may_tell_more_classes_apart_than_there_are(tmp_path: Path) -> None:
    run = make(tmp_path, model=Shaped(lambda s: s, 5), epochs=1)
    trained(run)
    assert run.budget.met()


def test_a_model_that_does_not_take_the_data_is_refused(tmp_path: Path) -> None:
    wide = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    with pytest.raises(ModelError, match=r"cannot take inputs of shape \(6,\) from the data toy \(RuntimeError"):
        make(tmp_path, model=wide, inputs=torch.randn(2, 9))


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot be written"):
        make(tmp_path / "file" / "run")


def test_one_of_several_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PrunusError, match=r"one process, .* as one of 2: .*distributed loop"):
        make(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for single in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", single)
        one_process()


def test_a_model_that_is_evaluated_trains_again_afterwards(tmp_path: Path) -> None:
    """Evaluation after an epoch must not leave dropout and running statistics off in the next."""
    modes: list[bool] = []
    run = make(tmp_path, epochs=2)
    run.gated.model.drop.register_forward_hook(lambda module, *_: modes.append(module.training))
    trained(run)
    epoch = [True] * STEPS + [False]
    assert modes == epoch * 2


def test_fewer_examples_than_a_batch_are_one_batch(tmp_path: Path) -> None:
    run = make(tmp_path, data=toy_data(train=7, test=3), epochs=2, accumulate=4, batch_size=32)
    log = trained(run)
    assert [line["step"] for line in of_kind(log, "epoch")] == [1, 2]
    assert run.budget.met()


def test_a_diverged_run_says_so_in_its_log(tmp_path: Path) -> None:
    run = poisoned(tmp_path, 2 * STEPS + 1)
    with pytest.raises(RunFailed) as caught:
        fit(run)
    (warning,) = of_kind(read(tmp_path / "log.jsonl"), "warning")
    assert warning["message"] == str(caught.value)
    assert not (tmp_path / "receipt.json").exists()


def test_an_accuracy_that_fell_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for values, loud in (([0.3, 0.9, 0.5, 0.79], True), ([0.3, 0.9, 0.5, 0.81], False)):
        run = make(tmp_path / str(loud), ("params=95%",), epochs=4)
        left = iter(values)
        monkeypatch.setattr(run, "_metric", lambda left=left: next(left))
        said = [line["message"] for line in of_kind(trained(run), "warning")]
        assert any("The accuracy fell from 90.0% to 79.0%" in message for message in said) == loud
