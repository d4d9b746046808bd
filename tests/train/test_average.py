"""The exponential moving average against a plain loop and against the weighted sum that it is."""

import math

import pytest
import torch
from torch import Tensor, nn

from prunus.train.average import Average


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,), ()]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def walk(own: list[nn.Parameter], steps: int, average: Average | None = None) -> list[list[Tensor]]:
    """Move the parameters about, and give every place they were at, the first included."""
    generator = torch.Generator().manual_seed(7)
    places = [[p.detach().clone() for p in own]]
    for _ in range(steps):
        for p in own:
            p.data += torch.randn(p.shape, generator=generator, dtype=p.dtype)
        if average is not None:
            average.update()
        places.append([p.detach().clone() for p in own])
    return places


def decay_at(step: int, decay: float) -> float:
    return min(decay, (1 + step) / (10 + step))


@pytest.mark.parametrize("decay", [0.1, 0.5, 0.99, 0.9999])
@pytest.mark.parametrize("steps", [0, 1, 2, 40])
def test_it_equals_a_plain_loop(decay: float, steps: int) -> None:
    own = parameters()
    average = Average(own, decay)
    places = walk(own, steps, average)
    expected = [p.clone() for p in places[0]]
    for t, place in enumerate(places[1:], 1):
        d = decay_at(t, decay)
        expected = [d * old + (1 - d) * new for old, new in zip(expected, place, strict=True)]
    for value, wanted in zip(average.values, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-13)
    assert average.steps == steps


@pytest.mark.parametrize("decay", [0.1, 0.5, 0.99])
def test_it_is_a_weighted_sum_whose_weights_add_up_to_one(decay: float) -> None:
    """The place at step t weighs (1 - d_t) times the product of all later d, the first place the product of all."""
    own, steps = parameters(), 25
    average = Average(own, decay)
    places = walk(own, steps, average)
    decays = [decay_at(t, decay) for t in range(1, steps + 1)]
    weights = [math.prod(decays)]
    weights += [(1 - decays[t]) * math.prod(decays[t + 1 :]) for t in range(steps)]
    assert sum(weights) == pytest.approx(1)
    for k, value in enumerate(average.values):
        wanted = sum((w * place[k] for w, place in zip(weights, places, strict=True)), torch.zeros_like(value))
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-13)


def test_the_first_steps_do_not_weigh_for_ever() -> None:
    """With the decay warmed up, the first place weighs prod_t (1 + t) / (10 + t) = 10! / ((n + 2) ... (n + 10))."""
    p = nn.Parameter(torch.ones(1, dtype=torch.float64))
    average = Average([p], 0.999999)
    p.data.zero_()
    for _ in range(20):
        average.update()
    wanted = math.factorial(21) / math.factorial(30) * math.factorial(10)
    assert average.values[0].item() == pytest.approx(wanted, rel=1e-12)


def test_it_is_no_view_of_the_parameters() -> None:
    own = parameters()
    average = Average(own, 0.9)
    before = [v.clone() for v in average.values]
    walk(own, 3)
    assert all(torch.equal(v, b) for v, b in zip(average.values, before, strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_in_place_puts_back_every_bit(fails: bool) -> None:
    own = parameters()
    average = Average(own, 0.9)
    walk(own, 4, average)
    own[0].data[0, 0] = math.nan
    bits = [p.detach().clone().view(torch.int64) for p in own]
    addresses = [p.data_ptr() for p in own]
    values = [v.clone() for v in average.values]

    def inside() -> None:
        with average.in_place():
            assert all(torch.equal(p, v) for p, v in zip(own, average.values, strict=True))
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            inside()
    else:
        inside()
    assert all(torch.equal(p.detach().view(torch.int64), b) for p, b in zip(own, bits, strict=True))
    assert [p.data_ptr() for p in own] == addresses
    assert all(torch.equal(v, b) for v, b in zip(average.values, values, strict=True))


def test_what_is_changed_while_it_is_in_place_reaches_neither_side() -> None:
    own = parameters()
    average = Average(own, 0.9)
    walk(own, 4, average)
    before, values = own[0].detach().clone(), average.values[0].clone()
    with average.in_place():
        own[0].data.zero_()
    assert torch.equal(own[0], before)
    assert torch.equal(average.values[0], values)


def test_take_is_for_good_and_leaves_requires_grad_alone() -> None:
    own = parameters()
    own[1].requires_grad_(False)
    average = Average(own, 0.9)
    walk(own, 4, average)
    assert not any(torch.equal(p, v) for p, v in zip(own, average.values, strict=True))
    average.take()
    assert all(torch.equal(p, v) for p, v in zip(own, average.values, strict=True))
    assert [p.requires_grad for p in own] == [True, False, True]
    own[0].data.zero_()
    assert average.values[0].abs().sum() > 0


def test_restart_forgets_the_past() -> None:
    own = parameters()
    average = Average(own, 0.9)
    walk(own, 6, average)
    average.restart()
    fresh = Average(own, 0.9)
    assert average.steps == 0
    assert all(torch.equal(v, f) for v, f in zip(average.values, fresh.values, strict=True))
    for p in own:
        p.data += 1
    average.update()
    fresh.update()
    assert all(torch.equal(v, f) for v, f in zip(average.values, fresh.values, strict=True))
