"""The reference loop against a slow one written out by hand, and every setting by what it does."""

import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_toys import CLASSES, FEATURES, STEPS, Net, make, of_kind, same, tensors, toy_data, trained

import prunus
from prunus.budget import Budget, parse
from prunus.data import Batches
from prunus.errors import BudgetError
from prunus.extrapolation import ExtrapolationFromThePast
from prunus.landing import land
from prunus.train import Run, Settings, accuracy

# ---- the order of the steps ------------------------------------------------------------------------------------------


def by_hand(budgets: tuple[str, ...], s: Settings) -> tuple[dict[str, Tensor], list[float]]:
    """Train the toy with plain torch, gates and a budget; give what `tensors` gives, and the mean loss by epoch."""
    data = toy_data()
    torch.manual_seed(s.seed)
    gated = prunus.gate(Net(), data.train_x[:2], keep=s.keep, per_example=s.per_example)
    batches = Batches(data.train_x, data.train_y, s.batch_size, seed=s.seed)
    number = len(batches)
    steps = math.ceil(number / s.accumulate)
    rate = 20 / (steps * s.constrained_epochs) if s.dual_rate is None else s.dual_rate
    gate_lr = min(0.5, max(0.01, 12 / (steps * s.constrained_epochs))) if s.gate_lr is None else s.gate_lr
    budget = Budget(
        gated, lines=parse(budgets), dual_rate=rate, dual=s.dual, restarts=s.restarts, extrapolate=s.extrapolate
    )
    optimizer: torch.optim.Optimizer = torch.optim.Adam(
        [{"params": list(gated.model.parameters())}, {"params": [gated.log_alpha]}]
    )
    if s.extrapolate:
        optimizer = ExtrapolationFromThePast(optimizer)
    losses = []
    for epoch in range(s.epochs):
        if epoch == s.constrained_epochs:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                land(gated, budget)
            gated.fix(noise=s.polish_noise)
        gated.train()
        found = []
        for k, (x, y) in enumerate(batches):
            done = (epoch + k / number) / s.epochs
            half_wave = 1.0 if done < 0.5 else 0.5 * (1 + math.cos(math.pi * (2 * done - 1)))
            optimizer.param_groups[0]["lr"] = s.weight_lr * (half_wave if s.weight_schedule == "cosine" else 1.0)
            optimizer.param_groups[1]["lr"] = gate_lr * (half_wave if s.gate_schedule == "cosine" else 1.0)
            if s.warm_up:
                budget.tighten((epoch + k / number) / (s.warm_up * s.constrained_epochs))
            loss = F.cross_entropy(gated(x), y)
            total = loss + budget.pressure()
            if s.weight_decay:
                total = total + s.weight_decay / 2 * gated.expected_l2(detach=True)
            (total / s.accumulate).backward()
            found.append(loss.item())
            if (k + 1) % s.accumulate and k + 1 < number:
                continue
            optimizer.step()
            optimizer.zero_grad()
            budget.step()
            if isinstance(optimizer, ExtrapolationFromThePast):
                with optimizer.settled():
                    gated.gates.clamp_(gated.log_alpha)
        losses.append(sum(found) / len(found))
    values = {name: value.detach().clone() for name, value in gated.model.state_dict().items()}
    values |= {"log_alpha": gated.log_alpha.detach().clone(), "lambda": budget.multiplier.weight.clone()}
    return values, losses


FAST: dict[str, Any] = {"weight_lr": 0.02, "gate_lr": 0.1, "polish": 0.0, "epochs": 2}
TWO = ("params=40%", "layer:fc1:macs=60%")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 2},
        {"accumulate": 3, "batch_size": 24},
        {"per_example": True},
        {"weight_decay": 0.1},
        {"extrapolate": True},
        {"dual": "expected", "restarts": False, "dual_rate": 0.7},
        {"weight_schedule": "constant", "gate_schedule": "cosine"},
        {"warm_up": 0.0, "keep": 0.6, "seed": 5},
        {"epochs": 4, "polish": 0.5},
        {"epochs": 4, "polish": 0.5, "polish_noise": True, "accumulate": 2},
    ],
    ids=str,
)
def test_it_equals_a_slow_loop_bit_for_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = FAST | settings
    run = make(tmp_path, TWO, **settings)
    seen: dict[str, Tensor] = {}
    run.save_checkpoint = lambda log: seen.update(tensors(run))  # type: ignore[method-assign]
    log = trained(run)
    expected, losses = by_hand(TWO, run.settings)
    assert same(seen, expected) == []
    assert [line["loss"] for line in of_kind(log, "epoch")] == pytest.approx(losses, rel=1e-6)
    fresh = make(tmp_path / "fresh", TWO, **settings)
    moved = same(tensors(fresh), expected)
    assert set(moved) >= {"fc1.weight", "fc3.bias", "norm.running_mean", "log_alpha", "lambda"}  # all have moved


def test_the_slow_loop_in_another_order_is_not_equal(tmp_path: Path) -> None:
    """The comparison can fail: other seeds, rates and orders end elsewhere."""
    run = make(tmp_path, TWO, **FAST)
    trained(run)
    for other in ({"seed": 1}, {"gate_lr": 0.09}, {"accumulate": 2}, {"dual_rate": 0.7}, {"weight_decay": 0.1}):
        expected, _ = by_hand(TWO, Settings(**{**run.settings.as_dict(), **other}))
        assert same(tensors(run), expected), other


# ---- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budgets",
    [("params=50%",), ("macs=15%",), ("bytes=500",), ("params=60%", "macs=40%"), ("layer:fc1=50%",),
     ("layer:fc*:macs=35%", "params=70%"), ("density=30%",), ("layer:fc2:density=40%",), ("params=120", "bytes=60%")],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("polish", [0.0, 0.4])
def test_a_run_ends_deployed_under_every_budget(tmp_path: Path, budgets: tuple[str, ...], polish: float) -> None:
    run = make(tmp_path, budgets, epochs=3, polish=polish, gate_lr=0.05)
    dense = [reading["deployed"] for reading in run.budget.readings()]
    assert not any(reading["met"] for reading in run.budget.readings())
    trained(run)
    readings = run.budget.readings()
    assert all(reading["deployed"] <= reading["limit"] for reading in readings)
    assert all(reading["deployed"] < before for reading, before in zip(readings, dense, strict=True))
    small, receipt = prunus.shrink(run.gated, run.inputs, seconds=1e-3)  # counted on the module itself
    assert all(line["met"] for line in receipt["budgets"])
    for line, reading in zip(run.budget.lines, readings, strict=True):
        if line.what == "params" and line.where is None:
            assert sum(p.numel() for p in small.parameters()) <= reading["limit"]
        if line.name == "layer:fc1":
            assert sum(p.numel() for p in small.get_submodule("fc1").parameters()) <= reading["limit"]


def test_enough_epochs_meet_a_budget_without_the_landing(tmp_path: Path) -> None:
    run = make(tmp_path, ("params=50%",), epochs=40, polish=0.0, weight_lr=0.02, gate_lr=0.1)
    log = trained(run)
    (landing,) = of_kind(log, "landing")
    assert landing["cost"][0]["before"] <= landing["cost"][0]["limit"] * 1.15
    assert of_kind(log, "epoch")[-1]["metric"]["value"] > 0.8


def test_what_no_network_reaches_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="cannot be reached"):
        make(tmp_path, ("params=5%",))
    with pytest.raises(BudgetError, match="'deployed' or the 'expected'"):
        make(tmp_path, dual="paper")


# ---- settings, each by what it does ----------------------------------------------------------------------------------


class Watched(Run):
    """A run that remembers the optimizer's rates and the budget's limits at every step."""

    def watch(self) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []
        inner = self.budget.step

        def step() -> None:
            rates = {group["which"]: group["lr"] for group in self.optimizer.param_groups}
            seen.append({**rates, "limits": self.budget.now.tolist()})
            inner()

        self.budget.step = step  # type: ignore[method-assign]
        trained(self)
        return seen


@pytest.mark.parametrize("weight, gate", [("cosine", "constant"), ("constant", "cosine")])
def test_the_schedules_reach_the_optimizer(tmp_path: Path, weight: str, gate: str) -> None:
    run = make(tmp_path, epochs=4, weight_lr=0.3, gate_lr=0.7, weight_schedule=weight, gate_schedule=gate, kind=Watched)
    assert isinstance(run, Watched)
    seen = run.watch()
    assert len(seen) == 4 * STEPS
    for which, schedule, rate in (("weight", weight, 0.3), ("gate", gate, 0.7)):
        for step, row in enumerate(seen):
            share = step / (4 * STEPS)
            factor = math.cos(math.pi * (share - 0.5)) ** 2 if schedule == "cosine" and share > 0.5 else 1.0
            assert row[which] == pytest.approx(rate * factor, abs=1e-12)
    assert seen[-1]["weight" if weight == "cosine" else "gate"] < 0.02


@pytest.mark.parametrize("warm_up", [0.0, 0.5, 1.0])
def test_the_limits_fall_geometrically_over_the_warm_up(tmp_path: Path, warm_up: float) -> None:
    run = make(tmp_path, ("params=40%", "macs=70%"), epochs=5, polish=0.2, warm_up=warm_up, kind=Watched)
    assert isinstance(run, Watched)
    seen = run.watch()
    dense, limits = run.budget.dense, run.budget.limits.tolist()
    for step, row in enumerate(seen):
        share = min(1.0, (step / STEPS) / (warm_up * 4)) if warm_up else 1.0
        assert row["limits"] == pytest.approx([d * (a / d) ** share for d, a in zip(dense, limits, strict=True)])
    assert seen[-1]["limits"] == pytest.approx(limits)


def test_accumulated_batches_are_one_step_on_their_mean(tmp_path: Path) -> None:
    """Two halves of every batch against the whole batch: the same gradients where nothing is drawn or normalised."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc1, self.fc2 = nn.Linear(FEATURES, 9), nn.Linear(9, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.fc1(x).relu())

    runs = []
    for size, accumulate in ((36, 1), (18, 2), (12, 3)):
        still = {"warm_up": 0.0, "weight_schedule": "constant"}  # both are read at every batch
        run = make(tmp_path / str(size), model=Plain(), batch_size=size, accumulate=accumulate, **FAST, **still)
        run.gated._noisy = False  # test-time gates while training, whose gradient is the pressure's alone
        trained(run)
        assert run.step == 2 * 4
        runs.append(tensors(run))
    for other in runs[1:]:
        for name, value in runs[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5)


def test_the_last_batches_of_an_epoch_make_a_step_of_their_own(tmp_path: Path) -> None:
    for accumulate, steps in ((1, 5), (2, 3), (3, 2), (5, 1), (9, 1)):
        run = make(tmp_path / str(accumulate), accumulate=accumulate, epochs=2)
        log = trained(run)
        assert run.steps_per_epoch == steps
        assert [line["step"] for line in of_kind(log, "epoch")] == [steps, 2 * steps]
        assert run.budget.dual_rate == pytest.approx(20 / steps)


class Recording(torch.optim.Adam):
    """Adam that remembers the gradients it is given, and does nothing."""

    grads: list[list[Tensor]]

    def step(self, closure: Any = None) -> None:
        self.grads.append([p.grad.clone() for group in self.param_groups for p in group["params"]])


def gradients(folder: Path, **settings: Any) -> tuple[Run, list[Tensor]]:
    """The gradients of the first step."""
    run = make(folder, epochs=1, batch_size=144, **settings)
    run.optimizer = Recording(run.optimizer.param_groups)
    run.optimizer.grads = []
    trained(run)
    return run, run.optimizer.grads[0]


def test_weight_decay_is_the_gradient_of_the_expected_l2(tmp_path: Path) -> None:
    """The same draws with and without: the difference is decay * p_active * weight, and nothing for the gates."""
    _, without = gradients(tmp_path / "a")
    run, with_decay = gradients(tmp_path / "b", weight_decay=0.5)
    names = [name for name, _ in run.gated.model.named_parameters()]
    p = make(tmp_path / "c").gated.p_active().detach()
    fc1_inputs, fc1, fc2 = p[:6], p[6:18], p[18:26]
    readers = {"fc1.weight": fc1_inputs, "fc2.weight": fc1, "fc3.weight": fc2}
    for name, a, b in zip(names, without, with_decay, strict=False):
        weight = run.gated.model.get_parameter(name).detach()
        torch.testing.assert_close(b - a, 0.5 * weight * readers.get(name, torch.ones(())), rtol=1e-4, atol=1e-6)
    assert torch.equal(without[-1], with_decay[-1])
    assert [group.name for group in run.gated.graph.groups] == ["fc1.inputs", "fc1", "fc2"]


def test_weight_decay_shrinks_the_weights(tmp_path: Path) -> None:
    sums = []
    for decay in (0.0, 0.3):
        run = make(tmp_path / str(decay), weight_decay=decay, weight_lr=0.02, epochs=6)
        trained(run)
        sums.append(sum(float(p.detach().square().sum()) for p in run.gated.weight_parameters()))
    assert sums[1] < 0.7 * sums[0]


def test_extrapolating_runs_evaluate_and_deploy_the_settled_point(tmp_path: Path) -> None:
    run = make(tmp_path, ("params=60%",), extrapolate=True, epochs=6, polish=0.4, weight_lr=0.02, gate_lr=0.1)
    assert isinstance(run.optimizer, ExtrapolationFromThePast)
    assert run.budget.extrapolate
    inner, held = run.settle, []

    def settle() -> None:
        for around in (nullcontext, run.settled):
            with around():
                held.append([p.detach().clone() for p in run.gated.parameters()])
        inner()

    run.settle = settle  # type: ignore[method-assign]
    log = trained(run)
    assert len(held) == 4  # at the landing and at the end
    for ahead, settled in (held[:2], held[2:]):
        assert any(not torch.equal(a, b) for a, b in zip(ahead, settled, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held[3], run.gated.parameters(), strict=True))
    value = accuracy(run.gated, run.data.test_x, run.data.test_y)
    assert of_kind(log, "epoch")[-1]["metric"]["value"] == value
    assert run.budget.met()
    plain = make(tmp_path / "plain", ("params=60%",), epochs=6, polish=0.4, weight_lr=0.02, gate_lr=0.1)
    trained(plain)
    assert "fc1.weight" in same(tensors(plain), tensors(run))


def test_one_sample_an_example(tmp_path: Path) -> None:
    asked: list[int | None] = []
    run = make(tmp_path, per_example=True, epochs=2)
    inner = run.gated.sample
    run.gated.sample = lambda examples=None: asked.append(examples) or inner(examples)  # type: ignore[method-assign]
    trained(run)
    assert asked == [32, 32, 32, 32, 16] * 2
    assert run.budget.met()


def test_bf16_computes_the_forward_pass_in_halves(tmp_path: Path) -> None:
    kinds: dict[str, set[torch.dtype]] = {}
    final: dict[str, dict[str, Tensor]] = {}
    for precision in ("no", "bf16"):
        seen: set[torch.dtype] = set()
        run = make(tmp_path / precision, precision=precision, epochs=4, polish=0.0, weight_lr=0.02)
        hook = run.gated.model.fc2.register_forward_hook(lambda m, i, output, seen=seen: seen.add(output.dtype))
        log = trained(run)
        hook.remove()
        kinds[precision], final[precision] = seen, tensors(run)
        assert all(math.isfinite(line["loss"]) for line in of_kind(log, "epoch"))
        assert run.budget.met()
    assert kinds == {"no": {torch.float32}, "bf16": {torch.bfloat16}}
    assert all(value.dtype != torch.bfloat16 for value in final["bf16"].values())
    assert "fc1.weight" in same(final["no"], final["bf16"])
