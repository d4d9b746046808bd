"""Runs: what they write, how they go on, and what they refuse to mix with."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
import torch
from cli_shell import SHORT, Said, call, receipt
from safetensors.torch import load_file

import prunus
from prunus.cli.folder import Folder
from prunus.models import MLP
from prunus.train import Settings

FILES = ("receipt.json", "small.safetensors", "report.html", "log.jsonl", "checkpoint")
RUN_KEYS = {"seed", "seconds", "device", "versions", "epochs", "method", "round_to", "landing"}


@pytest.fixture
def copied(finished: tuple[Path, Said], here: Path) -> Path:
    """The finished run, to be changed."""
    shutil.copytree(finished[0], here / "run")
    return here / "run"


def test_a_run_writes_everything(finished: tuple[Path, Said]) -> None:
    folder, said = finished
    assert said.code == 0, said.err
    assert all((folder / name).exists() for name in FILES)
    facts = receipt(folder)
    assert facts["schema"] == 1
    assert {"dense", "deployed", "budgets", "groups", "exactness", "metric", "run"} <= set(facts)
    for side in ("dense", "deployed"):
        assert {"params", "macs", "bytes", "latency_ms"} <= set(facts[side])
    (budget,) = facts["budgets"]
    assert set(budget) == {"what", "where", "limit", "expected", "deployed", "paper", "met"}
    assert budget["met"]
    assert facts["deployed"]["params"] <= 0.5 * facts["dense"]["params"]
    assert facts["exactness"]["ok"]
    assert facts["metric"]["dense"] > 0.5
    assert set(facts["run"]) >= RUN_KEYS
    small = prunus.load(MLP(inputs=64), folder / "small.safetensors")
    assert sum(p.numel() for p in small.parameters()) == facts["deployed"]["params"]


def test_widths_are_round_if_asked_also_when_a_run_goes_on(here: Path) -> None:
    words = (*SHORT, "--no-baseline", "--epochs", "3", "--out", "run")
    assert call(*words, "--round-to", "8", "--quiet").code == 0
    facts = receipt(here / "run")
    assert facts["run"]["round_to"] == 8
    assert all(len(g["kept"]) % 8 == 0 or len(g["kept"]) == g["size"] for g in facts["groups"].values())
    said = call(*words, "--round-to", "16", "--resume")
    assert (said.code, "--round-to 8, not 16" in said.err) == (2, True)
    said = call(*words, "--round-to", "0", "--overwrite")
    assert (said.code, "--round-to is 0; it must be 1 or more" in said.err) == (2, True)


@pytest.mark.parametrize("units", ["2:4", "8x8"])
def test_weights_removed_where_they_stand(units: str, here: Path) -> None:
    words = (*SHORT, "--no-baseline", "--units", units, "--out", "run", "--quiet")
    said = call(*words)
    assert said.code == 0, said.err
    facts = receipt(here / "run")
    assert facts["deployed"]["params"] <= 0.5 * facts["dense"]["params"]
    small = prunus.load(MLP(inputs=64), here / "run" / "small.safetensors")
    assert sum(int((p != 0).sum()) for p in small.parameters()) <= facts["deployed"]["params"]
    assert call("shrink", "run").code == 0
    assert receipt(here / "run")["groups"] == facts["groups"]


def test_what_it_shows(finished: tuple[Path, Said]) -> None:
    _, said = finished
    for word in ("dense", "deployed", "x smaller", "test accuracy", "(50%)", ": met", "equals the gated", "landing"):
        assert word in said.out
    assert "small.safetensors" in said.out
    assert "epoch 3/3" in said.err
    assert "dense baseline" in said.err
    assert "\x1b" not in said.out + said.err


def test_a_finished_run_is_neither_resumed_nor_overwritten(finished: tuple[Path, Said]) -> None:
    folder, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    said = call(*SHORT, "--out", folder, "--resume")
    assert said.code == 0
    assert "finished already" in said.err
    assert call("train", "--resume", "--out", folder).code == 0
    said = call(*SHORT, "--out", folder)
    assert said.code == 2
    assert "--overwrite" in said.err
    for other in (["--seed", "7"], ["--data", "clidata:good"], ["--model", "lenet5"], ["--units", "groups"]):
        said = call(*SHORT, *other, "--out", folder, "--resume")
        assert said.code == 2
        assert f"{other[0]} " in said.err
        assert other[1] in said.err
    assert "params=20%" in call("train", "--resume", "--out", folder, "--model", "mlp", "--budget", "params=20%").err
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_shrink_makes_the_same_again(copied: Path) -> None:
    before, weights = receipt(copied), load_file(copied / "small.safetensors")
    (copied / "receipt.json").unlink()
    (copied / "small.safetensors").unlink()
    said = call("shrink", "run", "--device", "cpu")
    assert said.code == 0, said.err
    assert "x smaller" in said.out
    again = load_file(copied / "small.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    after = receipt(copied)
    for key in ("groups", "budgets", "metric"):
        assert after[key] == before[key]


def test_damaged_checkpoints(copied: Path) -> None:
    state = copied / "checkpoint" / "state.safetensors"
    whole = state.read_bytes()
    (copied / "receipt.json").unlink()
    for damage in (whole[:1000], b"\xff" * 64, b""):
        state.write_bytes(damage)
        for words in (["train", "--resume", "--out", "run"], ["shrink", "run"]):
            said = call(*words)
            assert said.code == 2, said
            assert "damaged" in said.err
            assert "Traceback" not in said.err
            assert not (copied / "receipt.json").exists()
            assert state.read_bytes() == damage
    state.write_bytes(whole)
    (copied / "checkpoint" / "run.json").write_text('{"schema": 1, "model": 7}')
    said = call("shrink", "run")
    assert said.code == 2
    assert "run.json" in said.err


def test_report_of_one_run_and_of_several(copied: Path, finished: tuple[Path, Said], here: Path) -> None:
    (copied / "report.html").unlink()
    assert call("report", "run").out.strip() == "run/report.html"
    assert (copied / "report.html").stat().st_size > 10_000
    said = call("report", "run", finished[0], "--out", "both/page.html")
    assert said.code == 0, said.err
    assert (here / "both" / "page.html").stat().st_size > 10_000


def test_killed_and_resumed_ends_as_if_uninterrupted(here: Path) -> None:
    words = (*SHORT, "--no-baseline", "--epochs", "4", "--polish", "0.3")
    said = call(*words, "--out", "whole")
    assert said.code == 0, said.err
    process = subprocess.Popen(
        [sys.executable, "-m", "prunus", *words, "--out", "killed", "--quiet"], stderr=subprocess.PIPE
    )
    log = here / "killed" / "log.jsonl"
    for _ in range(2400):
        if process.poll() is not None or (log.exists() and log.read_text().count('"kind":"epoch"') >= 2):
            break
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (here / "killed" / "receipt.json").exists()
    said = call(*words, "--out", "killed")
    assert said.code == 2
    assert "--resume" in said.err
    said = call(*words, "--out", "killed", "--resume")
    assert said.code == 0, said.err
    one_file, other_file = (load_file(here / run / "small.safetensors") for run in ("whole", "killed"))
    assert list(one_file) == list(other_file)
    assert all(torch.equal(one_file[name], other_file[name]) for name in one_file)
    one, other = receipt(here / "whole"), receipt(here / "killed")
    for facts in (one, other):
        del facts["run"]["seconds"], facts["dense"]["latency_ms"], facts["deployed"]["latency_ms"]
    assert one == other


def test_the_model_changed_before_the_resume(here: Path) -> None:
    words = ("train", "--data", "clidata:good", "--budget", "params=60%", "--model", "clinets:small", "--epochs", "2")
    said = call(*words, "--device", "cpu", "--out", "run", "--polish", "0", "--quiet")
    assert (said.code, said.out, said.err.count("error")) == (0, "", 0), said.err
    (here / "run" / "receipt.json").unlink()
    nets = here / "clinets.py"
    nets.write_text(nets.read_text().replace("16", "17"))
    said = call(*words, "--device", "cpu", "--out", "run", "--resume")
    assert said.code == 2
    assert "another model" in said.err
    assert (here / "run" / "checkpoint" / "state.safetensors").exists()


def test_overwriting_waits_until_everything_is_checked(copied: Path) -> None:
    before = (copied / "receipt.json").read_bytes()
    said = call(*SHORT, "--budget", "layer:nothing=5%", "--out", "run", "--overwrite")
    assert said.code == 2
    assert (copied / "receipt.json").read_bytes() == before


def test_an_interrupt_before_the_first_epoch_keeps_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prunus.cli.train.fit", stop)
    said = call(*SHORT, "--no-baseline", "--out", "made/run")
    assert said.code == 130
    assert said.err.strip().splitlines()[-1].startswith("error: Interrupted before the first epoch")
    assert not (here / "made").exists()


def test_an_interrupt_later_says_how_to_go_on(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (copied / "receipt.json").unlink()
    monkeypatch.setattr("prunus.cli.train.fit", stop)
    said = call("train", "--out", "run", "--resume")
    assert said.code == 130
    assert "--resume goes on" in said.err
    assert (copied / "checkpoint" / "state.safetensors").exists()


def test_two_runs_do_not_share_a_folder(here: Path) -> None:
    (here / "run").mkdir()
    with filelock.FileLock(here / "run" / ".lock"):
        said = call(*SHORT, "--out", "run")
    assert said.code == 2
    assert "Another run is at work in run" in said.err


def test_help_needs_no_more_than_the_commands() -> None:
    heavy = ("torch", "prunus.train", "prunus.report")
    code = f"import sys, prunus.cli; sys.exit(sum(name in sys.modules for name in {heavy}))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_setting_has_an_option() -> None:
    from prunus.cli.app import SETTINGS

    assert sorted(SETTINGS) == sorted(Settings().as_dict())


def test_demo_settings_are_settings() -> None:
    from prunus.cli.job import DEMO

    Settings(**DEMO.settings)
    assert (DEMO.model, DEMO.data) == ("mlp", "digits")


def test_help_version_and_no_words() -> None:
    said = call("--version")
    assert said.out.strip() == f"prunus {prunus.__version__}"
    for words in ([], ["--help"]):
        said = call(*words)
        assert said.code == 0
        assert "inspect" in said.out
    said = call("train", "--help")
    assert f"[{Settings().epochs}]" in said.out
    assert "[on]" in said.out
    done = subprocess.run([sys.executable, "-m", "prunus", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == said_version()


def said_version() -> str:
    return f"prunus {prunus.__version__}\n"


def test_the_log_of_a_run_is_whole(finished: tuple[Path, Said]) -> None:
    kinds = [json.loads(line)["kind"] for line in (finished[0] / "log.jsonl").read_text().splitlines()]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("epoch") == 3
    assert torch.isfinite(torch.tensor(receipt(finished[0])["metric"]["shrunk"]))


def test_overwriting_removes_what_a_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    mine = [tmp_path / "notes.txt", tmp_path / "checkpoint" / "mine.pt", tmp_path / "plots" / "mine.csv"]
    theirs = [tmp_path / "receipt.json", tmp_path / "checkpoint" / "run.json", tmp_path / "plots" / "cost.svg"]
    for path in (*mine, *theirs):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    folder.clear()
    assert all(path.exists() for path in mine)
    assert not any(path.exists() for path in theirs)
