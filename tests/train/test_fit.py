"""From a run to its files, and the dense twin to compare with."""

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from train_toys import BATCH, STEPS, Net, make, of_kind, receipt_of, same, tensors, toy_data, trained, untimed

import prunus
from prunus.data import Batches
from prunus.errors import RunFailed
from prunus.measure import count_bytes, count_macs, count_params, evaluating
from prunus.receipt import Receipt, versions
from prunus.record import SCHEMA, read
from prunus.train import Run, Settings, accuracy, fit, fit_dense

BUDGETS = ("params=50%", "layer:fc2:macs=60%")
QUICK: dict[str, Any] = {"epochs": 4, "polish": 0.5, "weight_lr": 0.02, "gate_lr": 0.1}


def scores(network: nn.Module) -> torch.Tensor:
    with evaluating(network):
        result: torch.Tensor = network(toy_data().test_x)
    return result


# ---- files -----------------------------------------------------------------------------------------------------------


def test_what_it_writes_is_what_it_gives_back(tmp_path: Path) -> None:
    result = fit(make(tmp_path, BUDGETS, **QUICK))
    assert result.out == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint", "log.jsonl", "receipt.json", "small.safetensors",
    ]  # fmt: skip
    assert dict(Receipt.load(tmp_path / "receipt.json")) == dict(result.receipt)
    loaded = prunus.load(Net(seed=3), tmp_path / "small.safetensors")
    assert loaded.state_dict().keys() == result.small.state_dict().keys()
    assert all(torch.equal(value, result.small.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert torch.equal(scores(loaded), scores(result.small))
    assert not any("gate" in name or "alpha" in name for name in loaded.state_dict())


def test_the_receipt_holds_what_was_measured(tmp_path: Path) -> None:
    run = make(tmp_path, BUDGETS, seed=5, **QUICK)
    result = fit(run, dense=0.75)
    receipt, small = receipt_of(tmp_path), result.small
    x = toy_data().train_x[:2]
    for side, network in (("dense", Net()), ("deployed", small)):
        found = {"params": count_params(network), "macs": count_macs(network, (x,)), "bytes": count_bytes(network)}
        assert {what: receipt[side][what] for what in found} == found
    by_hand = sum(p.numel() for p in small.parameters())
    assert receipt["deployed"]["params"] == by_hand <= 0.5 * receipt["dense"]["params"]
    data = run.data
    assert receipt["metric"] == {
        "name": "accuracy",
        "dense": 0.75,
        "gated": accuracy(run.gated, data.test_x, data.test_y),
        "shrunk": (scores(small).argmax(1) == data.test_y).double().mean().item(),
    }
    assert receipt["exactness"]["ok"]
    torch.testing.assert_close(scores(small), scores(run.gated), rtol=1e-4, atol=1e-5)
    facts = receipt["run"]
    assert facts == {
        "seed": 5, "seconds": round(run.seconds, 3), "device": "cpu", "versions": versions(), "epochs": 4,
        "method": "l0", "round_to": 1, "landing": facts["landing"],
    }  # fmt: skip
    (landing,) = of_kind(read(tmp_path / "log.jsonl"), "landing")
    assert {key: landing[key] for key in facts["landing"]} == facts["landing"]
    assert [(b["what"], b["where"], b["met"]) for b in receipt["budgets"]] == [
        ("params", None, True), ("macs", "fc2", True),
    ]  # fmt: skip
    kept = {name: len(group["kept"]) for name, group in receipt["groups"].items()}
    assert kept == of_kind(read(tmp_path / "log.jsonl"), "epoch")[-1]["kept"]
    assert small.fc2.weight.shape == (kept["fc2"], kept["fc1"])


def test_without_a_dense_network_its_metric_is_null(tmp_path: Path) -> None:
    assert fit(make(tmp_path, **QUICK)).receipt["metric"]["dense"] is None


START = {
    "kind", "schema", "model", "data", "seed", "device", "epochs", "steps_per_epoch", "method", "settings", "versions",
    "dense", "budgets", "groups",
}  # fmt: skip


def test_the_log_begins_and_ends_as_the_record_documents(tmp_path: Path) -> None:
    run = make(tmp_path, BUDGETS, seed=5, ema=0.5, **QUICK)
    result = fit(run)
    log = read(tmp_path / "log.jsonl")
    start, end = log[0], log[-1]
    assert [line["kind"] for line in log].count("start") == 1
    assert set(start) == START
    assert (start["kind"], start["schema"], start["model"], start["data"]) == ("start", SCHEMA, "net", "toy")
    assert (start["seed"], start["device"], start["epochs"], start["method"]) == (5, "cpu", 4, "l0")
    assert start["steps_per_epoch"] == STEPS
    assert start["settings"] == {**run.settings.as_dict(), "dual_rate": 20 / (2 * STEPS)}
    assert start["versions"] == versions()
    assert start["dense"] == {key: result.receipt["dense"][key] for key in ("params", "macs", "bytes")}
    assert [(b["what"], b["where"], b["limit"], b["dense"]) for b in start["budgets"]] == [
        ("params", None, 119.5, 239), ("macs", "fc2", 0.6 * 96, 96),
    ]  # fmt: skip
    assert [(g["name"], g["size"], g["unit"]) for g in start["groups"]] == [
        ("fc1.inputs", 6, "input"), ("fc1", 12, "neuron"), ("fc2", 8, "neuron"),
    ]  # fmt: skip
    assert set(end) == {"kind", "seconds", "receipt"}
    assert end["kind"] == "end"
    assert end["seconds"] == run.seconds
    assert end["receipt"] == receipt_of(tmp_path)
    kinds = [line["kind"] for line in log]
    assert kinds.index("landing") < kinds.index("end")
    assert set(kinds) <= {"start", "step", "epoch", "landing", "warning", "end"}


class Doomed(Net):
    """Gives NaN in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        doomed = self.training and not torch.compiler.is_exporting()
        return result * math.nan if doomed else result


def test_an_earlier_runs_results_are_gone_before_the_new_one_fails(tmp_path: Path) -> None:
    fit(make(tmp_path, **QUICK))
    assert (tmp_path / "receipt.json").exists()
    assert (tmp_path / "small.safetensors").exists()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFailed):
        fit(make(tmp_path, model=Doomed(), **QUICK))
    assert not (tmp_path / "receipt.json").exists()
    assert not (tmp_path / "small.safetensors").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_result_above_its_budget_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("prunus.train.fit")
    inner = module.shrink

    def missing(*args: Any, **named: Any) -> Any:
        small, receipt = inner(*args, **named)
        receipt["budgets"][-1]["met"] = False
        return small, receipt

    monkeypatch.setattr(module, "shrink", missing)
    with pytest.raises(RunFailed, match="above its budget"):
        fit(make(tmp_path, BUDGETS, **QUICK))
    assert not (tmp_path / "receipt.json").exists()
    assert not (tmp_path / "small.safetensors").exists()
    assert read(tmp_path / "log.jsonl")[-1]["kind"] != "end"


def test_fitting_anew_writes_the_same_again(tmp_path: Path) -> None:
    for name in "ab":
        fit(make(tmp_path / name, BUDGETS, **QUICK))
    before = (tmp_path / "b" / "small.safetensors").read_bytes()
    fit(make(tmp_path / "b", BUDGETS, **QUICK))
    assert (tmp_path / "a" / "small.safetensors").read_bytes() == before
    assert (tmp_path / "b" / "small.safetensors").read_bytes() == before
    one, other = (untimed(read(tmp_path / name / "log.jsonl")) for name in "ab")
    assert one == other


@pytest.mark.parametrize("settings", [{"ema": 0.9}, {"extrapolate": True}, {"ema": 0.9, "polish": 0.0}], ids=str)
def test_what_is_shrunk_is_what_was_measured_last(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = make(tmp_path, ("params=95%",), **QUICK | {"epochs": 6, "weight_lr": 0.05, "dual_rate": 9.0} | settings)
    result = fit(run)
    log = read(tmp_path / "log.jsonl")
    landing, last = of_kind(log, "landing")[0], of_kind(log, "epoch")[-1]
    if run.settings.polish_epochs or not landing["closed"]:
        assert result.receipt["metric"]["shrunk"] == last["metric"]["value"]
    if run.average is not None:
        assert all(torch.equal(p, v) for p, v in zip(run.average.parameters, run.average.values, strict=True))


# ---- the dense twin --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_dense_twin_equals_a_plain_loop(ema: float | None) -> None:
    settings = Settings(epochs=4, batch_size=BATCH, seed=3, weight_lr=0.02, ema=ema)
    data, model, plain = toy_data(), Net(), Net()
    found = fit_dense(model, data, settings, torch.device("cpu"))
    torch.manual_seed(3)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.02)
    batches = Batches(data.train_x, data.train_y, BATCH, seed=3)
    mean = [p.detach().clone() for p in plain.parameters()]
    step = 0
    for epoch in range(4):
        for k, (x, y) in enumerate(batches):
            done = (epoch + k / STEPS) / 4
            optimizer.param_groups[0]["lr"] = 0.02 * (
                1.0 if done < 0.5 else 0.5 * (1 + math.cos(math.pi * (2 * done - 1)))
            )
            optimizer.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            optimizer.step()
            step += 1
            decay = min(0.9, (1 + step) / (10 + step))
            mean = [decay * old + (1 - decay) * p.detach() for old, p in zip(mean, plain.parameters(), strict=True)]
    if ema is None:
        assert all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
        )
    else:
        for a, b in zip(model.parameters(), mean, strict=True):
            torch.testing.assert_close(a.detach(), b, rtol=1e-5, atol=1e-6)
    assert found == accuracy(model, data.test_x, data.test_y) > 0.7
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), Net().parameters(), strict=True))


def test_the_dense_twin_follows_the_seed_and_nothing_else() -> None:
    data, ends = toy_data(), []
    for k, seed in enumerate((3, 3, 4)):
        torch.manual_seed(k + 50)
        model = Net()
        fit_dense(model, data, Settings(epochs=1, batch_size=BATCH, seed=seed), torch.device("cpu"))
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    assert same(ends[0], ends[1]) == []
    assert "fc1.weight" in same(ends[0], ends[2])


def test_with_and_without_a_dense_twin_a_run_draws_the_same(tmp_path: Path) -> None:
    """As the command line trains it: after the run was made, in a fork of the generator."""
    ends = []
    for twin in (False, True):
        run = make(tmp_path / str(twin), BUDGETS, **QUICK)
        state = torch.get_rng_state()
        if twin:
            with torch.random.fork_rng():
                fit_dense(Net(), run.data, run.settings, run.device, run.progress)
        assert torch.equal(torch.get_rng_state(), state)
        trained(run)
        ends.append(tensors(run))
    assert same(*ends) == []


def test_a_run_leaves_another_models_weights_alone(tmp_path: Path) -> None:
    twin = Net()
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    run: Run = make(tmp_path, model=Net(), **QUICK)
    fit(run)
    assert same(before, dict(twin.state_dict())) == []
