"""One term of the loss and one line behind the optimizer, in the loops that people write."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import prunus
from prunus.budget import Budget
from prunus.gated import Gated
from prunus.measure import count_params, evaluating

STEPS = 120
LIMIT = 0.4


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One thread, and no accelerator left behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    AcceleratorState._reset_state()


def task() -> tuple[Tensor, Tensor]:
    """Four noisy patterns."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(4, 12, generator=generator)
    y = torch.arange(64) % 4
    return patterns[y] + 0.5 * torch.randn(64, 12, generator=generator), y


def start() -> tuple[Gated, Budget]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
    gated = prunus.gate(model, task()[0][:2])
    return gated, Budget(gated, params=LIMIT, dual_rate=0.05)


def adam(gated: Gated) -> Optimizer:
    return torch.optim.Adam(
        [{"params": gated.weight_parameters()}, {"params": gated.gate_parameters(), "lr": 5e-2}], lr=1e-2
    )


def sgd(gated: Gated) -> Optimizer:
    return torch.optim.SGD(
        [{"params": gated.weight_parameters()}, {"params": gated.gate_parameters(), "lr": 0.3}], lr=0.1, momentum=0.9
    )


def adamw(gated: Gated) -> Optimizer:
    return torch.optim.AdamW(
        [{"params": gated.weight_parameters()}, {"params": gated.gate_parameters(), "lr": 5e-2, "weight_decay": 0.0}],
        lr=1e-2,
        weight_decay=1e-2,
    )


# ---- the loops -------------------------------------------------------------------------------------------------------


def plain(gated: Gated, budget: Budget, optimizer: Optimizer) -> None:
    x, y = task()
    for step in range(STEPS):
        budget.tighten(step / 80)
        loss = F.cross_entropy(gated(x), y) + budget.pressure()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        budget.step()


def accumulating(gated: Gated, budget: Budget, optimizer: Optimizer) -> None:
    x, y = task()
    for step in range(STEPS):
        budget.tighten(step / 80)
        for a, b in zip(x.split(16), y.split(16), strict=True):
            ((F.cross_entropy(gated(a), b) + budget.pressure()) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        budget.step()


def scaled(gated: Gated, budget: Budget, optimizer: Optimizer) -> None:
    x, y = task()
    scaler = torch.amp.GradScaler("cpu")
    assert scaler.is_enabled()
    for step in range(STEPS):
        budget.tighten(step / 80)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(gated(x), y) + budget.pressure()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        budget.step()


def accelerated(precision: str) -> Callable[[Gated, Budget, Optimizer], None]:
    def loop(gated: Gated, budget: Budget, optimizer: Optimizer) -> None:
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        x, y = task()
        network, wrapped = accelerator.prepare(gated, optimizer)
        for step in range(STEPS):
            budget.tighten(step / 80)
            loss = F.cross_entropy(network(x), y) + budget.pressure()
            accelerator.backward(loss)
            wrapped.step()
            wrapped.zero_grad()
            budget.step()

    return loop


LOOPS: dict[str, tuple[Callable[[Gated, Budget, Optimizer], None], Callable[[Gated], Optimizer]]] = {
    "adam": (plain, adam),
    "sgd": (plain, sgd),
    "adamw": (plain, adamw),
    "accumulating": (accumulating, adam),
    "grad scaler": (scaled, adam),
    "accelerate": (accelerated("no"), adam),
    "accelerate bf16": (accelerated("bf16"), adam),
    "accelerate bf16 sgd": (accelerated("bf16"), sgd),
}


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_ends_under_its_budget(name: str) -> None:
    loop, make = LOOPS[name]
    gated, budget = start()
    x, y = task()
    with evaluating(gated):
        before = F.cross_entropy(gated(x), y).item()
    dense = budget.dense[0]
    assert gated.deployed()["params"] == dense
    loop(gated, budget, make(gated))
    assert gated.deployed()["params"] < 0.7 * dense  # training itself pruned
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how much the landing closes is not the question here
        small, receipt = prunus.shrink(gated, x[:2], batches=())
    assert count_params(small) == receipt["deployed"]["params"] <= LIMIT * dense
    assert receipt["budgets"][0]["met"]
    assert {p.dtype for p in small.parameters()} == {torch.float32}
    with evaluating(small):
        out = small(x)
    assert F.cross_entropy(out, y).item() < 0.6 * before
    assert (out.argmax(1) == y).float().mean().item() > 0.85


def test_as_many_loops_are_tried_as_there_are() -> None:
    assert len(LOOPS) == 8


# ---- the same gradients whatever the loop ----------------------------------------------------------------------------


def gradients(gated: Gated) -> list[Tensor]:
    found = []
    for parameter in gated.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.clone())
    return found


def one_large_batch(gated: Gated, budget: Budget) -> list[Tensor]:
    x, y = task()
    torch.manual_seed(9)
    gated.zero_grad()
    (F.cross_entropy(gated(x), y) + budget.pressure()).backward()
    return gradients(gated)


def pressing() -> tuple[Gated, Budget]:
    gated, budget = start()
    with torch.no_grad():
        budget.multiplier.weight.fill_(0.8)
    return gated, budget


def close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-5) -> None:
    assert len(found) == len(wanted) == 7
    for one, two in zip(found, wanted, strict=True):
        assert two.abs().max() > 0
        assert (one - two).abs().max() <= tolerance * two.abs().max()


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("each", [True, False])
def test_small_batches_add_up_to_the_gradient_of_a_large_one(parts: int, each: bool) -> None:
    """Under the same gates; with the pressure in every part's share, or once."""
    gated, budget = pressing()
    wanted = one_large_batch(gated, budget)
    budget.step()
    moved = budget.multiplier.weight.clone()
    assert moved.item() > 0.8

    gated, budget = pressing()
    x, y = task()
    gated.zero_grad()
    for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
        torch.manual_seed(9)
        loss = F.cross_entropy(gated(a), b)
        ((loss + budget.pressure()) / parts if each else loss / parts).backward()
    if not each:
        budget.pressure().backward()
    close(gradients(gated), wanted)
    budget.step()
    assert torch.equal(budget.multiplier.weight, moved)  # one dual step, however many looks were taken


def test_deterministic_gates_need_no_seed() -> None:
    found = []
    for parts in (1, 4):
        gated, budget = pressing()
        gated._noisy = False
        x, y = task()
        gated.zero_grad()
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            ((F.cross_entropy(gated(a), b) + budget.pressure()) / parts).backward()
        found.append(gradients(gated))
    close(found[1], found[0])


@pytest.mark.parametrize("scale", [2.0**3, 2.0**16])
def test_a_scaler_gives_the_gradient_back_unscaled(scale: float) -> None:
    gated, budget = pressing()
    wanted = one_large_batch(gated, budget)
    gated, budget = pressing()
    optimizer, scaler = sgd(gated), torch.amp.GradScaler("cpu", init_scale=scale)
    x, y = task()
    torch.manual_seed(9)
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(gated(x), y) + budget.pressure()).backward()
    assert gated.log_alpha.grad is not None
    assert gated.log_alpha.grad.abs().max() > 0.9 * scale * wanted[0].abs().max()
    scaler.unscale_(optimizer)
    close(gradients(gated), wanted)


def test_a_step_that_the_scaler_skips_leaves_the_gates_alone() -> None:
    gated, budget = pressing()
    optimizer, scaler = adam(gated), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(dict(gated.named_parameters()))
    x, y = task()
    loss = F.cross_entropy(gated(x), y) * torch.tensor(float("inf")) + budget.pressure()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    budget.step()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(parameter, before[name]) for name, parameter in gated.named_parameters())
    assert budget.multiplier.weight.item() == pytest.approx(0.8 + 0.05 * (1 / LIMIT - 1), rel=1e-5)


@pytest.mark.parametrize("precision, tolerance", [("no", 1e-6), ("bf16", 0.1)])
def test_accelerate_gives_the_plain_gradient(precision: str, tolerance: float) -> None:
    gated, budget = pressing()
    wanted = one_large_batch(gated, budget)
    gated, budget = pressing()
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    network: Any = accelerator.prepare(gated)
    x, y = task()
    torch.manual_seed(9)
    out = network(x)
    assert out.dtype == torch.float32
    accelerator.backward(F.cross_entropy(out, y) + budget.pressure())
    close(gradients(gated), wanted, tolerance)


def test_the_pressure_is_not_rounded_under_autocast() -> None:
    gated, budget = pressing()
    budget.tighten(0.5)
    wanted = budget.pressure()
    (slope,) = torch.autograd.grad(wanted, gated.log_alpha)
    with torch.autocast("cpu", torch.bfloat16):
        value = budget.pressure()
        (found,) = torch.autograd.grad(value, gated.log_alpha)
    assert value.dtype == torch.float32
    assert torch.equal(value, wanted)
    assert torch.equal(found, slope)
