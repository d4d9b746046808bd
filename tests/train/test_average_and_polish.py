"""What comes out of a run: its average, and what the landing and the polish leave."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from train_toys import STEPS, make, of_kind, same, tensors, trained

from prunus.record import Writer
from prunus.train import accuracy

# ---- the average -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("polish", [0.0, 0.5])
def test_the_average_is_what_is_measured_and_what_comes_out(tmp_path: Path, polish: float) -> None:
    run = make(tmp_path, ema=0.9, epochs=6, polish=polish, weight_lr=0.05)
    log = trained(run)
    assert run.average is not None
    for parameter, value in zip(run.average.parameters, run.average.values, strict=True):
        assert torch.equal(parameter, value)
    if polish:  # nothing was closed since the last epoch was measured
        value = accuracy(run.gated, run.data.test_x, run.data.test_y)
        assert of_kind(log, "epoch")[-1]["metric"]["value"] == value


@pytest.mark.parametrize("polish", [0.0, 0.5])
def test_the_average_comes_out_of_an_extrapolating_run_too(tmp_path: Path, polish: float) -> None:
    run = make(tmp_path, ema=0.9, extrapolate=True, epochs=6, polish=polish, weight_lr=0.05)
    trained(run)
    assert run.average is not None
    with run.settled():
        for parameter, value in zip(run.average.parameters, run.average.values, strict=True):
            assert torch.equal(parameter, value)


def test_the_average_begins_anew_at_the_landing(tmp_path: Path) -> None:
    run = make(tmp_path, ema=0.9, epochs=6, polish=0.5, weight_lr=0.05)
    inner, steps = run._land, []

    def landing(log: Writer) -> None:
        assert run.average is not None
        before = [value.clone() for value in run.average.values[:-1]]
        inner(log)
        steps.append(run.average.steps)
        assert all(torch.equal(p, b) for p, b in zip(run.gated.weight_parameters(), before, strict=True))
        assert all(torch.equal(p, v) for p, v in zip(run.average.parameters, run.average.values, strict=True))

    run._land = landing  # type: ignore[method-assign]
    trained(run)
    assert steps == [0]
    assert run.average is not None
    assert run.average.steps == 3 * STEPS


# ---- landing and polish ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("extrapolate", [False, True])
def test_after_the_landing_the_gates_stay_and_the_weights_do_not(
    tmp_path: Path, noise: bool, extrapolate: bool
) -> None:
    run = make(
        tmp_path, ("params=50%", "macs=60%"), epochs=8, polish=0.5, polish_noise=noise, extrapolate=extrapolate,
        weight_lr=0.02, gate_lr=0.05, weight_schedule="constant",
    )  # fmt: skip
    places: list[dict[str, Tensor]] = []
    deployed, draws = [], []
    inner = run.save_checkpoint

    def remember(log: Writer) -> None:
        inner(log)
        if run.gated.fixed:
            places.append(tensors(run))
            deployed.append((run.gated.deployed(), run.gated.keep().kept()))
            draws.append(run.gated.train().sample().clone())

    run.save_checkpoint = remember  # type: ignore[method-assign]
    log = trained(run)
    assert len(places) == 4
    for before, after in pairwise(places):
        changed = same(before, after)
        assert "log_alpha" not in changed
        assert "lambda" not in changed
        assert "fc3.weight" in changed
    assert all(cost == deployed[0] for cost in deployed)
    (landing,) = of_kind(log, "landing")
    assert landing["epoch"] == 4
    phases = [line["phase"] for line in of_kind(log, "epoch")]
    assert phases == ["train"] * 4 + ["polish"] * 4
    for line in of_kind(log, "epoch")[4:]:
        assert line["deployed"] == deployed[0][0]
        assert [budget["deployed"] for budget in line["budgets"]] == [cost["after"] for cost in landing["cost"]]
    assert torch.equal(draws[0], draws[1]) is not noise
    closed = run.gated.open_units() == 0
    assert closed.any()
    assert all((draw[closed] == 0).all() for draw in draws)


def test_the_landing_is_in_the_log_with_what_it_closed(tmp_path: Path) -> None:
    run = make(tmp_path, ("params=30%", "macs=90%"), epochs=2, polish=0.0, gate_lr=0.01)
    before = run.budget.readings()
    log = trained(run)
    (landing,) = of_kind(log, "landing")
    after = run.budget.readings()
    assert [line["kind"] for line in log[-3:]] == ["epoch", "landing", "warning"]
    assert log[-1]["message"].startswith("The landing had to close")
    assert [(c["what"], c["before"], c["after"]) for c in landing["cost"]] == [
        (b["what"], b["deployed"], a["deployed"]) for b, a in zip(before, after, strict=True)
    ]
    assert landing["closed"] == int((run.gated.open_units() == 0).sum())
