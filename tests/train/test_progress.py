"""What a person sees: a bar on a terminal, plain lines elsewhere, nothing if asked."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from train_toys import Net, make, of_kind, toy_data, trained

from prunus.record import read
from prunus.train import Progress, Run, Settings, fit, fit_dense

BUDGETS = ("params=50%", "layer:fc1:macs=25%")
READINGS = [
    {"expected": 60.0, "deployed": 80, "limit": 50.0, "dense": 200.0, "multiplier": 1.2345},
    {"expected": 0.05, "deployed": 72, "limit": 18.0, "dense": 72.0, "multiplier": -0.0},
]


def console(terminal: bool, width: int = 160) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(force_terminal=terminal, file=file, width=width, highlight=False, color_system=None), file


def plain(text: str) -> str:
    """Without the codes that move a terminal's cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make(tmp_path, BUDGETS)


def frames(file: io.StringIO) -> str:
    """What has been shown since the last call."""
    text = plain(file.getvalue())
    file.seek(0)
    file.truncate()
    return text


def test_the_bar_shows_everything_a_person_asks_for(run: Run) -> None:
    screen, file = console(True)
    progress = Progress(screen)
    with progress.running(Settings(epochs=20), run.budget):
        progress.step(1.5, 0.98765, READINGS)
        progress._bar.refresh()  # type: ignore[union-attr]
        shown = frames(file)
        assert "epoch 1.5 of 20" in shown
        assert "loss 0.9877" in shown
        assert "accuracy" not in shown  # nothing is known yet
        assert "params: expected 30.0%, deployed 40.0%, limit 25.0%, multiplier 1.23" in shown
        assert "layer:fc1:macs: expected 0.069%, deployed 100.0%, limit 25.0%, multiplier 0" in shown
        progress.epoch(2, 0.5, 0.9125, READINGS)
        progress._bar.refresh()  # type: ignore[union-attr]
        shown = frames(file)
        assert "epoch 2.0 of 20" in shown
        assert "loss 0.5000" in shown
        assert "test accuracy 91.25%" in shown
        assert "\n" not in shown.split("epoch 2.0 of 20")[1].split("left")[0]
        assert re.search(r"\d:\d\d:\d\d +[-\d]:[-\d]{2}:[-\d]{2} +left", shown)
        progress.say("shrinking")
        progress._bar.refresh()  # type: ignore[union-attr]
        assert "shrinking" in frames(file)
    assert progress._bar is None
    assert "\x1b[?25h" in file.getvalue()  # the cursor is given back


def test_the_time_left_is_told_by_the_pace(run: Run) -> None:
    now = [1000.0]
    screen, file = console(True)
    screen.get_time = lambda: now[0]  # type: ignore[method-assign]
    progress = Progress(screen)
    with progress.running(Settings(epochs=10), run.budget):
        for epoch in (1.0, 2.0, 3.0, 4.0):
            now[0] += 30
            progress._bar.get_time = lambda: now[0]  # type: ignore[union-attr]
            progress.step(epoch, 1.0, READINGS)
        progress._bar.refresh()  # type: ignore[union-attr]
        assert "0:03:00 left" in frames(file)  # six epochs of half a minute


def test_narrow_terminals_cut_the_facts_and_not_the_screen(run: Run) -> None:
    screen, file = console(True, width=40)
    progress = Progress(screen)
    with progress.running(Settings(epochs=20), run.budget):
        progress.step(1.5, 0.98765, READINGS)
        frames(file)
        progress._bar.refresh()  # type: ignore[union-attr]
        lines = frames(file).replace("\r", "\n").split("\n")
    assert any(line.startswith("params: expected 30.0%") for line in lines)
    assert all(len(line) <= 40 for line in lines)


def test_elsewhere_every_epoch_is_one_plain_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("prunus.train.progress.time.perf_counter", lambda: now[0])
    screen, file = console(False)
    progress = Progress(screen)
    with progress.running(Settings(epochs=4), run.budget):
        progress.step(0.5, 0.9, READINGS)
        assert file.getvalue() == ""
        now[0] += 30
        progress.epoch(1, 0.5, 0.9125, READINGS)
        now[0] += 30
        progress.epoch(2, 0.25, 0.95, READINGS)
        progress.say("shrinking")
    lines = file.getvalue().splitlines()
    assert lines[0] == (
        "epoch 1/4  loss 0.5000  test accuracy 91.25%  params: expected 30.0%, deployed 40.0%, limit 25.0%, multiplier "
        "1.23  layer:fc1:macs: expected 0.069%, deployed 100.0%, limit 25.0%, multiplier 0  30 s, 90 s left"
    )
    assert lines[1].startswith("epoch 2/4  loss 0.2500  test accuracy 95.00%")
    assert lines[1].endswith("60 s, 60 s left")
    assert len(lines) == 2
    assert "\x1b" not in file.getvalue()


def test_a_resumed_run_reckons_with_the_epochs_it_trained_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("prunus.train.progress.time.perf_counter", lambda: now[0])
    screen, file = console(False)
    progress = Progress(screen)
    with progress.running(Settings(epochs=20), run.budget):
        now[0] += 7
        progress.epoch(16, 0.5, 0.9, READINGS)
        now[0] += 7
        progress.epoch(17, 0.5, 0.9, READINGS)
    assert [line.split("  ")[-1] for line in file.getvalue().splitlines()] == ["7 s, 28 s left", "14 s, 21 s left"]


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_says_nothing_at_all(run: Run, terminal: bool) -> None:
    screen, file = console(terminal)
    progress = Progress(screen, quiet=True)
    tick = progress.baseline(3)
    with progress.running(Settings(epochs=4), run.budget):
        for epoch in range(1, 4):
            tick(epoch)
            progress.step(epoch - 0.5, 0.5, READINGS)
            progress.epoch(epoch, 0.5, 0.9, READINGS)
        progress.say("shrinking")
        progress.warn("The multipliers are too slow.")
    progress.close()
    assert file.getvalue() == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_warnings_are_said_once_each(run: Run, terminal: bool) -> None:
    screen, file = console(terminal, width=200)
    progress = Progress(screen)
    with progress.running(Settings(epochs=4), run.budget):
        for _ in range(3):
            progress.warn("The multipliers [are] too slow.")
            progress.warn("The gates are, too.")
    shown = plain(file.getvalue())
    assert shown.count("warning: The multipliers [are] too slow.") == 1
    assert shown.count("warning: The gates are, too.") == 1


def test_names_that_look_like_markup_are_shown_as_they_are(run: Run) -> None:
    screen, file = console(False)
    progress = Progress(screen)
    with progress.running(Settings(epochs=4), run.budget):
        progress._names = ["layer:[red]fc1", "[/]"]
        progress.epoch(1, 0.5, 0.9, READINGS)
    assert "layer:[red]fc1: expected" in file.getvalue()


def test_an_error_takes_the_bar_away(run: Run) -> None:
    screen, file = console(True)
    progress = Progress(screen)
    wrong = [{**READINGS[0], "expected": "much"}, READINGS[1]]
    with pytest.raises(TypeError), progress.running(Settings(epochs=4), run.budget):
        progress.step(0.5, 0.5, wrong)
    assert progress._bar is None
    assert "\x1b[?25h" in file.getvalue()


# ---- the dense baseline ----------------------------------------------------------------------------------------------


def test_the_baseline_speaks_five_times_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("prunus.train.progress.time.perf_counter", lambda: now[0])
    screen, file = console(False)
    tick = Progress(screen).baseline(10)
    for epoch in range(1, 11):
        now[0] += 2
        tick(epoch)
    lines = file.getvalue().splitlines()
    assert lines[0] == "dense baseline: epoch 2/10, 16 s left"
    assert [line.split(",")[0] for line in lines] == [f"dense baseline: epoch {k}/10" for k in (2, 4, 6, 8, 10)]


def test_the_baseline_has_a_bar_of_its_own_that_goes_when_it_is_done() -> None:
    screen, file = console(True)
    progress = Progress(screen)
    settings = Settings(epochs=2, batch_size=64)
    tick = progress.baseline(3)
    tick(1)
    progress._bar.refresh()  # type: ignore[union-attr]
    assert "dense baseline" in frames(file)
    tick(3)
    assert progress._bar is None
    fit_dense(Net(), toy_data(), settings, torch.device("cpu"), progress)
    assert progress._bar is None
    assert "dense baseline" in frames(file)


# ---- a whole run -----------------------------------------------------------------------------------------------------


def test_a_run_speaks_the_lines_of_its_log(tmp_path: Path) -> None:
    screen, file = console(False)
    run = make(tmp_path, ("params=30%",), epochs=6, polish=0.0, gate_lr=1e-5, progress=Progress(screen))
    result = fit(run)
    log = read(tmp_path / "log.jsonl")
    lines = file.getvalue().splitlines()
    said = [line for line in lines if line.startswith("epoch ")]
    assert len(said) == 6
    for line, epoch in zip(said, of_kind(log, "epoch"), strict=True):
        (budget,) = epoch["budgets"]
        dense = result.receipt["dense"]["params"]
        for words in (
            f"epoch {epoch['epoch']}/6  loss {epoch['loss']:.4f}  test accuracy {epoch['metric']['value']:.2%}",
            f"expected {budget['expected'] / dense:.1%}, deployed {budget['deployed'] / dense:.1%}, limit 30.0%",
            f"multiplier {budget['multiplier']:.3g}",
        ):
            assert words in line
    warned = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    assert warned == [line["message"] for line in of_kind(log, "warning")]
    assert len(warned) == 2  # the pace, and the landing
    assert len(lines) == len(said) + len(warned)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_is_the_same_whoever_looks_on(tmp_path: Path, terminal: bool) -> None:
    screen, file = console(terminal)
    losses: list[list[Any]] = []
    for name, progress in (("shown", Progress(screen)), ("quiet", None)):
        run = make(tmp_path / name, epochs=3, progress=progress)
        with run.progress.running(run.settings, run.budget):
            losses.append([line["loss"] for line in of_kind(trained(run), "step")])
    assert losses[0] == losses[1]
    assert "epoch" in plain(file.getvalue())
