"""Every mistake ends with one plain sentence, the right exit code, and nothing left behind."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_shell import SHORT, Said, call

TRAIN = ("train", "--device", "cpu", "--no-baseline", "--epochs", "1", "--out", "made/deep/run")
DIGITS = (*TRAIN, "--model", "mlp", "--data", "digits")
BUDGET = ("--budget", "params=50%")


def refused(said: Said, *words: str, code: int = 2) -> None:
    assert said.code == code, said
    assert said.out == ""
    last = said.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert last.endswith(".") or "Try: prunus" in last
    assert "Traceback" not in said.err
    for word in words:
        assert word in last, last


@pytest.mark.parametrize(
    ("budgets", "words"),
    [
        (["params=0%"], ["params=0%", "above zero"]),
        (["params=0"], ["params=0", "above zero"]),
        (["macs=-10%"], ["macs=-10%", "above zero"]),
        (["params=150%"], ["params=150%", "over 100%"]),
        (["params=10parsec"], ["'parsec'", "known for params"]),
        (["bytes=4XB"], ["'XB'", "MB, GB"]),
        (["parms=10%"], ["'parms'", "nearest: params"]),
        (["params"], ["'params'", "no limit"]),
        (["layer:=50%"], ["names no layer"]),
        (["params=10%", "params=20%"], ["contradict", "params=10%", "params=20%"]),
        (["layer:hiden.0=50%"], ["'hiden.0'", "nearest: hidden.0"]),
        (["params=0.01%"], ["params=0.01%", "cannot be reached", "least possible"]),
    ],
)
def test_budgets(here: Path, budgets: list[str], words: list[str]) -> None:
    options = [word for budget in budgets for word in ("--budget", budget)]
    refused(call(*DIGITS, *options), *words)
    assert not (here / "made").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mpl", ["'mpl'", "nearest: mlp"]),
        ("nowhere:factory", ["no module nowhere"]),
        ("clinets:smal", ["has no smal", "nearest: small"]),
        ("clinets:", ["names no model factory"]),
        ("clinets:number", ["returned int", "torch.nn.Module"]),
        ("clinets:instance", ["is a Linear", "fresh module"]),
        ("clinets:raising", ["RuntimeError: no weights today"]),
        ("clinets:needs", ["without arguments", "width"]),
        ("clinets:empty", ["no parameters"]),
        ("clinets:branching", ["Branching", "cannot be exported"]),
        ("clinets:few", ["4 classes", "digits has 10"]),
        ("clinets:residual", ["1, 8, 8", "digits"]),
        ("lenet5", ["28x28", "1x8x8"]),
    ],
)
def test_models(here: Path, model: str, words: list[str]) -> None:
    refused(call(*TRAIN, "--data", "digits", "--model", model, *BUDGET), *words)
    assert not (here / "made").exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("digit", ["'digit'", "nearest: digits"]),
        ("clidata:none", ["train_x is empty"]),
        ("clidata:below", ["label -1", "train_y"]),
        ("clidata:nan", ["NaN", "(3, 0, 2, 1)"]),
        ("clidata:goood", ["nearest: good"]),
    ],
)
def test_data(here: Path, data: str, words: list[str]) -> None:
    refused(call(*TRAIN, "--model", "mlp", "--data", data, *BUDGET), *words)
    assert not (here / "made").exists()


def test_a_damaged_data_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = here / "data" / "mnist"
    folder.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte.gz").write_bytes(b"\x1f\x8b\x08 and then nothing")
    monkeypatch.setenv("PRUNUS_DATA", str(here / "data"))
    refused(call(*TRAIN, "--model", "lenet5", "--data", "mnist", *BUDGET), "train-images-idx3-ubyte.gz")
    assert not (here / "made").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "cuda" if not torch.cuda.is_available() else "cuda:77"], ["no device 'cuda"]),
        (["--device", "toaster"], ["no device 'toaster'"]),
        (["--epochs", "0"], ["--epochs is 0"]),
        (["--epochs", "many"], ["--epochs"]),
        (["--batch-size", "0"], ["--batch-size is 0"]),
        (["--keep", "2"], ["--keep is 2"]),
        (["--seed", "-1"], ["--seed is -1"]),
        (["--seed", "18446744073709551616"], ["--seed is 18446744073709551616"]),
        (["--weight-lr", "inf"], ["--weight-lr is inf", "finite"]),
        (["--dual-rate", "1e300"], ["--dual-rate is 1e+300", "finite"]),
        (["--epochs", "99999999999999999999"], ["--epochs is 9", "at most"]),
        (["--input", "99999999x99999x8x8"], ["do not fit into memory"]),
        (["--method", "l1"], ["'l1'", "l0"]),
        (["--precision", "fp4"], ["'fp4'", "bf16"]),
        (["--units", "structred"], ["'structred'", "nearest: structured", "2:4"]),
        (["--units", "4:2"], ["'4:2'", "such as 2:4"]),
        (["--units", "2:4", "--round-to", "8"], ["no width changes"]),
        (["--round-to", "0"], ["--round-to is 0"]),
        (["--only", "hiden*"], ["'hiden*'", "hidden.0"]),
        (["--input", "axb"], ["'axb'", "2x3x32x32"]),
        (["--modl", "mlp"], ["--modl", "--model"]),
        (["--resume"], ["no run in made/deep/run"]),
        (["--resume", "--overwrite"], ["give one of them"]),
    ],
)
def test_options(here: Path, options: list[str], words: list[str]) -> None:
    refused(call(*DIGITS, *BUDGET, *options), *words)
    assert not (here / "made").exists()


def test_half_a_command(here: Path) -> None:
    refused(call("train", "--model", "mlp"), "--data and --budget must be given")
    refused(call("train", "--budget", "params=10%", "--data", "digits"), "--model must be given")
    refused(call("inspect"), "--model")
    refused(call("trian"), "'trian'", "train")
    refused(call("inspect", "--model", "clinets:bare"), "--input")
    refused(call("data", "get", "mnits"), "'mnits'", "nearest: mnist")
    refused(call("shrink", "nowhere"), "nowhere")
    refused(call("report", "nowhere"), "nowhere")
    refused(call("report", "nowhere", "neither", "--out", "page/report.html"), "nowhere")
    assert sorted(path.name for path in here.iterdir()) == ["clidata.py", "clinets.py"]


def test_places_that_cannot_be_written(here: Path) -> None:
    (here / "file").write_text("mine")
    for out in ("file", "file/run", "/proc/prunus/run"):
        refused(call(*DIGITS, *BUDGET, "--out", out), out.split("/")[0])
    assert (here / "file").read_text() == "mine"
    (here / "held").mkdir()
    (here / "held" / "receipt.json").write_text("mine")
    refused(call(*DIGITS, *BUDGET, "--out", "held"), "held", "receipt.json", "--overwrite")
    assert (here / "held" / "receipt.json").read_text() == "mine"


def test_a_full_disk(here: Path) -> None:
    """A limit on the size of files stands in for the disk: the checkpoint is beyond it, the log is not."""
    words = [*SHORT, "--no-baseline", "--out", "made/run"]
    script = f"ulimit -f 64; exec {sys.executable} -m prunus {' '.join(words)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    refused(Said(done.returncode, done.stdout, done.stderr), "cannot be written")
    assert not (here / "made").exists()


def test_a_loss_that_turns_nan(here: Path) -> None:
    words = (*DIGITS, *BUDGET, "--epochs", "4", "--batch-size", "256")
    refused(call(*words, "--weight-lr", "1e20"), "diverged", "epoch 1", "learning rates", code=3)
    assert not (here / "made").exists()
