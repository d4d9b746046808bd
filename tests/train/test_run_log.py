"""What a run writes down, and that its seed decides it all."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from train_toys import STEPS, Net, make, of_kind, same, tensors, trained

import prunus

# ---- the log ---------------------------------------------------------------------------------------------------------


FIELDS = {
    "step": {"step", "epoch", "loss", "expected", "budgets"},
    "epoch": {
        "epoch", "step", "phase", "loss", "metric", "seconds", "expected", "deployed", "budgets", "kept", "open",
    },
    "landing": {"epoch", "closed", "cost"},
    "warning": {"message"},
}  # fmt: skip
MEASURES = {"params", "macs", "bytes"}


def test_the_log_holds_what_the_record_documents(tmp_path: Path) -> None:
    run = make(tmp_path, ("params=30%", "layer:fc1:macs=50%"), epochs=6, polish=0.3, log_every=2, gate_lr=0.05)
    log = trained(run)
    for line in log:
        assert set(line) >= FIELDS[line["kind"]] | {"kind"}
        if line["kind"] in ("step", "epoch"):
            assert set(line["expected"]) == MEASURES
            assert [set(budget) for budget in line["budgets"]] == [{"expected", "deployed", "paper", "multiplier"}] * 2
    steps, epochs = of_kind(log, "step"), of_kind(log, "epoch")
    assert [line["step"] for line in steps] == list(range(2, 6 * STEPS + 1, 2))
    assert [line["epoch"] for line in steps] == pytest.approx([line["step"] / STEPS for line in steps])
    assert [line["epoch"] for line in epochs] == list(range(1, 7))
    assert [line["step"] for line in epochs] == [k * STEPS for k in range(1, 7)]
    sizes = run.gated.graph.sizes
    for line in epochs:
        assert set(line["deployed"]) == MEASURES
        assert line["deployed"]["params"] == line["budgets"][0]["deployed"]
        assert line["expected"]["params"] == pytest.approx(line["budgets"][0]["expected"])
        assert set(line["metric"]) == {"name", "value"}
        assert line["kept"].keys() == sizes.keys()
        assert all(1 <= line["kept"][name] <= size for name, size in sizes.items())
        assert len(line["open"]) == 20
        assert sum(line["open"]) == run.gated.units
        assert all(type(count) is int for count in line["open"])
    assert epochs[-1]["kept"] == {name: int(mask.sum()) for name, mask in run.gated.keep().units.items()}
    seconds = [line["seconds"] for line in epochs]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert seconds[-1] == run.seconds
    assert [set(cost) >= {"what", "where", "before", "after"} for cost in of_kind(log, "landing")[0]["cost"]] == [
        True
    ] * 2


def test_the_loss_in_the_log_is_the_mean_since_the_epoch_began(tmp_path: Path) -> None:
    run = make(tmp_path, epochs=2, log_every=1)
    losses: list[float] = []
    inner = run.accelerator.backward
    pressure = run.budget.pressure
    pressed: list[float] = []

    def press() -> Tensor:
        value = pressure()
        pressed.append(float(value.detach()))
        return value

    def backward(total: Tensor) -> None:
        losses.append(float(total.detach()) - pressed[-1])
        inner(total)

    run.accelerator.backward, run.budget.pressure = backward, press  # type: ignore[method-assign]
    log = trained(run)
    for epoch in range(2):
        own = losses[epoch * STEPS : (epoch + 1) * STEPS]
        lines = of_kind(log, "step")[epoch * STEPS : (epoch + 1) * STEPS]
        for k, line in enumerate(lines, 1):
            assert line["loss"] == pytest.approx(sum(own[:k]) / k, abs=1e-5)
        assert of_kind(log, "epoch")[epoch]["loss"] == pytest.approx(lines[-1]["loss"], rel=1e-6)


def test_about_four_hundred_steps_are_logged_unless_it_is_said(tmp_path: Path) -> None:
    for epochs, every in ((1, 1), (80, 1), (160, 2), (1000, 12)):
        assert make(tmp_path, log_every=None, epochs=epochs).log_every == every
    assert make(tmp_path, log_every=7).log_every == 7


def test_the_last_value_of_the_metric_is_that_of_the_network(tmp_path: Path) -> None:
    run = make(tmp_path, epochs=4, polish=0.5, weight_lr=0.05)
    log = trained(run)
    with prunus.measure.evaluating(run.gated):
        right = run.gated(run.data.test_x).argmax(1) == run.data.test_y
    assert of_kind(log, "epoch")[-1]["metric"] == {"name": "accuracy", "value": right.sum().item() / len(right)}


def test_a_pace_that_is_too_slow_is_warned_of_once_a_line(tmp_path: Path) -> None:
    run = make(tmp_path, ("params=30%", "macs=30%"), epochs=12, polish=0.0, gate_lr=1e-5)
    said: list[str] = []
    run.progress.warn = said.append  # type: ignore[method-assign]
    log = trained(run)
    messages = [line["message"] for line in of_kind(log, "warning")]
    early = [message for message in messages if message.startswith("At this pace")]
    assert [message.split(" the budget ")[1].split(" ")[0] for message in early] == ["params=30%", "macs=30%"]
    assert run.warned == ["params", "macs"]
    assert said == messages
    at = next(k for k, line in enumerate(log) if line["kind"] == "warning")
    before = [line for line in log[:at] if line["kind"] == "epoch"]
    assert len(before) == 4  # a third of twelve
    assert "after epoch 4 " in early[0]


def test_a_pace_that_is_good_is_not_warned_of(tmp_path: Path) -> None:
    run = make(tmp_path, ("params=95%",), epochs=9, polish=0.0, gate_lr=0.3, dual_rate=1.0, warm_up=0.2)
    assert not [line for line in of_kind(trained(run), "warning") if line["message"].startswith("At this pace")]


# ---- seeds -----------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path: Path) -> None:
    ends, logs = [], []
    for k, seed in enumerate((3, 3, 4)):
        torch.manual_seed(1000 + k)  # what was drawn before does not matter
        torch.rand(k)
        run = make(tmp_path / str(k), epochs=2, seed=seed, gate_lr=0.1, weight_lr=0.02)
        log = trained(run)
        ends.append(tensors(run))
        logs.append([[line["loss"], line["expected"]] for line in of_kind(log, "step")])
    assert same(ends[0], ends[1]) == []
    assert logs[0] == logs[1]
    assert set(same(ends[0], ends[2])) >= {"fc1.weight", "fc3.bias", "log_alpha", "norm.running_mean"}


def test_what_a_model_draws_when_it_is_made_does_not_change_the_run(tmp_path: Path) -> None:
    """The gates, the order and the noise follow the seed alone, however many numbers the factory took."""

    def greedy() -> Net:
        torch.randn(1234)
        return Net()

    runs = [make(tmp_path / str(k), model=model, epochs=2) for k, model in enumerate((Net(), greedy()))]
    assert torch.equal(runs[0].gated.log_alpha, runs[1].gated.log_alpha)
    assert [y.tolist() for _, y in runs[0].batches] == [y.tolist() for _, y in runs[1].batches]
    ends = []
    for k, model in enumerate((Net(), greedy())):
        run = make(tmp_path / f"again{k}", model=model, epochs=2)
        trained(run)
        ends.append(tensors(run))
    assert same(*ends) == []
