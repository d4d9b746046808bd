"""Extrapolation from the past against plain loops, the optimistic gradient method, and what it is for."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prunus.extrapolation import ExtrapolationFromThePast

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def parameter(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def backward(loss: Tensor, *parameters: Tensor) -> None:
    for p in parameters:
        p.grad = None
    loss.backward()


def quartic(x: Tensor) -> Tensor:
    return (x**4 / 4 + x**2 - x).sum()


def quartic_slope(x: float) -> float:
    return x**3 + 2 * x - 1


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def settled_values(optimizer: ExtrapolationFromThePast, *parameters: Tensor) -> list[float]:
    with optimizer.settled():
        return [value for p in parameters for value in p.tolist()]


def test_sgd_equals_a_plain_loop() -> None:
    x = parameter(1.5, -0.7)
    optimizer = ExtrapolationFromThePast(SGD([x], lr=0.05))
    points, extrapolated = [1.5, -0.7], [1.5, -0.7]
    for _ in range(30):
        backward(quartic(x), x)
        optimizer.step()
        for i in range(2):
            before = points[i]
            points[i] = before - 0.05 * quartic_slope(extrapolated[i])
            extrapolated[i] = points[i] + (points[i] - before)
        assert x.tolist() == pytest.approx(extrapolated, rel=1e-14)
        assert settled_values(optimizer, x) == pytest.approx(points, rel=1e-14)


def test_sgd_equals_the_papers_two_lines() -> None:
    """Gidel et al.: x_{t+1/2} = x_t - eta F(x_{t-1/2}), x_{t+1} = x_t - eta F(x_{t+1/2}), on a game of two players."""
    eta, x, y = 0.2, parameter(1.0), parameter(-0.5)
    players = [ExtrapolationFromThePast(SGD([p], lr=eta, maximize=up)) for p, up in ((x, False), (y, True))]

    def field(at: tuple[float, float]) -> tuple[float, float]:  # of x^2/4 + xy - y^2/4: down in x, up in y
        return at[0] / 2 + at[1], -(at[0] - at[1] / 2)

    point, past = (1.0, -0.5), (0.0, 0.0)  # no past at first: F(x_{-1/2}) = 0
    for _ in range(40):
        half = (point[0] - eta * past[0], point[1] - eta * past[1])
        assert [x.item(), y.item()] == pytest.approx(half, abs=1e-13)
        past = field(half)
        point = (point[0] - eta * past[0], point[1] - eta * past[1])
        backward((x**2 / 4 + x * y - y**2 / 4).sum(), x, y)
        for player in players:
            player.step()
        assert [settled_values(players[0], x)[0], settled_values(players[1], y)[0]] == pytest.approx(point, abs=1e-13)


def test_sgd_is_the_optimistic_gradient_method() -> None:
    x, eta = parameter(2.0, 0.3, -1.0), 0.04
    optimizer = ExtrapolationFromThePast(SGD([x], lr=eta))
    y, past = x.detach().clone(), torch.zeros(3, dtype=torch.float64)
    for _ in range(25):
        backward(quartic(x), x)
        optimizer.step()
        gradient = y**3 + 2 * y - 1
        y, past = y - eta * (2 * gradient - past), gradient
        torch.testing.assert_close(x.detach(), y, rtol=1e-12, atol=1e-13)


def play(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer], steps: int, eta: float) -> float:
    x, y = parameter(1.0), parameter(1.0)
    players = [wrap(SGD([x], lr=eta)), wrap(SGD([y], lr=eta, maximize=True))]
    for _ in range(steps):
        backward((x * y).sum(), x, y)
        for player in players:
            player.step()
    return math.hypot(x.item(), y.item())


def test_bilinear_game_diverges_without_and_converges_with() -> None:
    steps, eta = 300, 0.2
    plain = play(lambda optimizer: optimizer, steps, eta)
    assert plain == pytest.approx(math.sqrt(2) * (1 + eta**2) ** (steps / 2))  # away from (0, 0), each step
    assert plain > 100
    # Optimistic gradient: z^2 - z = +-i eta (2 z - 1); its larger root, 0.978 in size at 0.2, is the rate.
    roots = [r for sign in (1, -1) for r in _roots(1, -1 - 2j * sign * eta, 1j * sign * eta)]
    rate = max(abs(root) for root in roots)
    found = play(ExtrapolationFromThePast, steps, eta)
    assert found < 1e-2
    assert found == pytest.approx(math.sqrt(2) * rate**steps, rel=0.2)


def _roots(a: complex, b: complex, c: complex) -> list[complex]:
    half = (b * b - 4 * a * c) ** 0.5
    return [(-b + half) / (2 * a), (-b - half) / (2 * a)]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
        lambda p: Adam(p, lr=0.02),
        lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
    ],
)
def test_any_optimizer_equals_restoring_and_repeating_by_hand(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, twin = network(), network()
    optimizer, plain = ExtrapolationFromThePast(make(model.parameters())), make(twin.parameters())
    points = [p.detach().clone() for p in twin.parameters()]
    for step in range(12):
        train(model, optimizer, range(step, step + 1))
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        twin(inputs).square().mean().backward()
        with torch.no_grad():
            for p, point in zip(twin.parameters(), points, strict=True):
                p.copy_(point)
            plain.step()
            for p, point in zip(twin.parameters(), points, strict=True):
                move = p - point
                point.copy_(p)
                p.add_(move)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)


def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Any) -> None:
    model = network()
    optimizer = ExtrapolationFromThePast(Adam(model.parameters(), lr=0.01))
    train(model, optimizer, range(10))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    expected = train(model, optimizer, range(10, 20))

    other = network()
    resumed = ExtrapolationFromThePast(Adam(other.parameters(), lr=0.5))
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(saved["optimizer"])
    other.load_state_dict(saved["model"])
    assert train(other, resumed, range(10, 20)) == expected
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    with optimizer.settled(), resumed.settled():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def test_a_copy_goes_its_own_way() -> None:
    model = network()
    optimizer = ExtrapolationFromThePast(Adam(model.parameters(), lr=0.01))
    train(model, optimizer, range(3))
    other, twin = copy.deepcopy((model, optimizer))
    assert train(other, twin, range(3, 6)) == train(model, optimizer, range(3, 6))


def test_settled_puts_back_exactly_and_nests() -> None:
    model = network()
    optimizer = ExtrapolationFromThePast(Adam(model.parameters(), lr=0.1))
    train(model, optimizer, range(5))
    before = [p.detach().clone() for p in model.parameters()]
    with optimizer.settled():
        inside = [p.detach().clone() for p in model.parameters()]
        assert not torch.equal(inside[0], before[0])
        with optimizer.settled():
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), inside, strict=True))
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), inside, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    with pytest.raises(KeyError), optimizer.settled():
        raise KeyError
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_settled_before_the_first_step_changes_nothing() -> None:
    x = parameter(1.0)
    assert settled_values(ExtrapolationFromThePast(SGD([x], lr=0.1)), x) == [1.0]


def test_a_projection_inside_settled_lasts() -> None:
    x = parameter(1.0)
    optimizer = ExtrapolationFromThePast(SGD([x], lr=1.0))
    backward((3 * x).sum(), x)
    optimizer.step()
    assert x.item() == -5
    x.data.clamp_(min=0)
    with optimizer.settled():
        assert x.item() == -2
        x.data.clamp_(min=0)
    assert x.item() == 0
    assert settled_values(optimizer, x) == [0.0]
    backward((-2 * x).sum(), x)
    optimizer.step()
    assert settled_values(optimizer, x) == [2.0]


def test_inside_settled_nothing_steps_or_is_saved() -> None:
    x = parameter(1.0)
    optimizer = ExtrapolationFromThePast(SGD([x], lr=0.1))
    state = optimizer.state_dict()
    with optimizer.settled():
        for act in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(state), optimizer.forget):
            with pytest.raises(ValueError, match=r"inside `settled\(\)`"):
                act()
    optimizer.load_state_dict(optimizer.state_dict())


def test_forget_starts_from_what_the_parameters_hold() -> None:
    x, fresh = parameter(1.0), parameter(4.0)
    optimizer, other = (ExtrapolationFromThePast(Adam([p], lr=0.1)) for p in (x, fresh))
    for _ in range(3):
        backward(quartic(x), x)
        optimizer.step()
    x.data.fill_(4.0)
    optimizer.forget()
    assert settled_values(optimizer, x) == [4.0]
    optimizer.state.clear()
    for p, chosen in ((x, optimizer), (fresh, other)):
        for _ in range(2):
            backward(quartic(p), p)
            chosen.step()
    assert torch.equal(x, fresh)


def test_parameters_without_a_gradient() -> None:
    used, late = parameter(1.0), parameter(1.0)
    optimizer = ExtrapolationFromThePast(Adam([used, late], lr=0.1))
    optimizer.step()  # nothing to do at all
    backward(quartic(used), used, late)
    optimizer.step()
    assert late.item() == 1.0
    backward(quartic(used + late), used, late)
    optimizer.step()  # Adam makes the late one's moments only now
    assert late.item() != 1.0
    backward(quartic(late), used, late)
    settled = settled_values(optimizer, used)
    optimizer.step()  # no update to repeat: back at the settled point
    assert used.tolist() == settled


def test_groups_may_be_added() -> None:
    x, y = parameter(1.0), parameter(1.0)
    optimizer = ExtrapolationFromThePast(SGD([x], lr=0.1))
    backward(quartic(x), x)
    optimizer.step()
    optimizer.add_param_group({"params": [y], "lr": 0.2})
    backward(quartic(x) + quartic(y), x, y)
    optimizer.step()
    assert y.item() == pytest.approx(1 - 2 * 0.2 * quartic_slope(1.0))
    assert "lr: 0.2" in repr(optimizer)


def test_the_closure_sees_the_extrapolated_point() -> None:
    x, y = parameter(1.0), parameter(1.0)
    closed, plain = ExtrapolationFromThePast(SGD([x], lr=0.1)), ExtrapolationFromThePast(SGD([y], lr=0.1))
    for _ in range(4):

        def closure() -> float:
            loss = quartic(x)
            backward(loss, x)
            return loss.item()

        expected = quartic(y)
        backward(expected, y)
        plain.step()
        assert closed.step(closure) == expected.item()
        assert torch.equal(x, y)


def test_schedulers_and_hooks_take_it() -> None:
    x = parameter(1.0)
    optimizer = ExtrapolationFromThePast(SGD([x], lr=1.0))
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen: list[float] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(x.item()))
    backward((x * 2).sum(), x)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.defaults["lr"] == 1.0
    assert seen == [-3.0]
    optimizer.zero_grad()
    assert x.grad is None


def test_a_scaler_skips_an_overflowed_step_and_takes_the_next() -> None:
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer, plain = ExtrapolationFromThePast(SGD([x], lr=0.25)), ExtrapolationFromThePast(SGD([y], lr=0.25))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, math.inf, 2.0):
        backward(scaler.scale((factor * x).sum()), x)
        scaler.step(optimizer)
        scaler.update()
        if math.isfinite(factor):
            backward((factor * y).sum(), y)
            plain.step()
        assert torch.equal(x, y)


def test_what_cannot_be_wrapped_is_refused() -> None:
    x = parameter(1.0)
    with pytest.raises(ValueError, match="LBFGS"):
        ExtrapolationFromThePast(torch.optim.LBFGS([x]))
    with pytest.raises(ValueError, match="already"):
        ExtrapolationFromThePast(ExtrapolationFromThePast(SGD([x], lr=0.1)))
