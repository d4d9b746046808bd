"""Penalised L0 against a loop over single weights and against formulas by hand."""

import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import prunus
from prunus.errors import BudgetError
from prunus.gated import Gated
from prunus.methods import Penalty
from prunus.methods.l0 import read_strength


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class LeNet(nn.Module):
    """3 and 4 maps, 16 features, 5 neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 4, 2)
        self.fc1, self.fc2 = nn.Linear(16, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(F.max_pool2d(self.conv1(x).relu(), 2)).relu()
        return self.fc2(self.fc1(x.flatten(1)).relu())


class Residual(nn.Module):
    """A stream of 5 that three layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down, self.out = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.out(x + self.down(self.up(x).relu()))


# By weight: the group that owns it in the papers' counting, and along which dimension its units lie.
OWNERS: dict[str, dict[str, tuple[str, int]]] = {
    "lenet": {"conv1.weight": ("conv1", 0), "conv2.weight": ("conv2", 0), "fc1.weight": ("fc1.inputs", 1),
              "fc2.weight": ("fc1", 1)},
    "residual": {"stem.weight": ("stem.inputs", 1), "up.weight": ("stem", 1), "down.weight": ("up", 1),
                 "out.weight": ("stem", 1)},
}  # fmt: skip
MODELS = {"lenet": (LeNet, (2, 1, 8, 8)), "residual": (Residual, (2, 6))}
GATED: dict[tuple[str, str], Gated] = {}


def gated_again(name: str, seed: int = 0, units: str = "structured") -> Gated:
    if (name, units) not in GATED:
        make, shape = MODELS[name]
        GATED[name, units] = prunus.gate(make(), torch.randn(shape), units=units)
    one = GATED[name, units]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        one.log_alpha.copy_(2 * torch.randn(one.units, generator=generator) - 1)
    one.log_alpha.grad = None
    return one


def p_of(location: float) -> float:
    """P(z != 0), 001 eq. 12."""
    return 1 / (1 + math.exp(2 / 3 * math.log(0.1 / 1.1) - location))


def weight_by_weight(one: Gated, name: str, locations: list[float], strengths: dict[str, float]) -> float:
    """Every single weight costs its layer's lambda times the probability of its owner's gate."""
    total = 0.0
    for weight, (group, dim) in OWNERS[name].items():
        start = one.cost.offsets[group]
        shape = one.model.get_parameter(weight).shape
        for entry in torch.cartesian_prod(*(torch.arange(size) for size in shape)):
            total += strengths[weight.partition(".")[0]] * p_of(locations[start + int(entry[dim])])
    return total


def closed_form(name: str, p: Tensor, lambdas: list[float]) -> Tensor:
    """Sizes of groups of weights, written down: lambda |g| P."""
    if name == "lenet":
        conv1, conv2, inputs, fc1 = p.split([3, 4, 16, 5])
        parts = [9 * conv1.sum(), 12 * conv2.sum(), 5 * inputs.sum(), 3 * fc1.sum()]
    else:
        inputs, stem, up = p.split([6, 5, 4])
        parts = [5 * inputs.sum(), 4 * stem.sum(), 5 * up.sum(), 3 * stem.sum()]
    return torch.stack([lambda_ * part for lambda_, part in zip(lambdas, parts, strict=True)]).sum()


def layers(name: str) -> list[str]:
    return [weight.partition(".")[0] for weight in OWNERS[name]]


# ---- value and gradient ----------------------------------------------------------------------------------------------

STRENGTHS: list[tuple[Any, list[float]]] = [
    (0.01, [0.01] * 4),
    ("0.5/N", [0.5 / 200] * 4),
    ({"*": "1e-2"}, [0.01] * 4),
    ("each", [0.3, 0.02, 0.001, 4.0 / 200]),
    ("one", [0.0, 0.5, 0.0, 0.0]),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("strength, lambdas", STRENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_the_penalty_counts_every_weight_once_at_its_owner(
    name: str, strength: Any, lambdas: list[float], seed: int
) -> None:
    one = gated_again(name, seed)
    if strength == "each":
        strength = dict(zip(layers(name), [0.3, "0.02", 1e-3, "4/N"], strict=True))
    elif strength == "one":
        strength = {layers(name)[1]: 0.5}
    penalty = Penalty(one, strength, examples=200)
    value = penalty.pressure()
    by_layer = dict(zip(layers(name), lambdas, strict=True))
    assert value.item() == pytest.approx(weight_by_weight(one, name, one.log_alpha.tolist(), by_layer), rel=1e-5)

    at = one.log_alpha.detach().double().requires_grad_()
    formula = closed_form(name, torch.sigmoid(at - 2 / 3 * math.log(0.1 / 1.1)), lambdas)
    assert value.item() == pytest.approx(formula.item(), rel=1e-5)
    (wanted,) = torch.autograd.grad(formula, at)
    (found,) = torch.autograd.grad(value, one.log_alpha)
    assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    one = gated_again(name, 5)
    strengths = dict.fromkeys(layers(name), 0.7)
    (found,) = torch.autograd.grad(Penalty(one, 0.7).pressure(), one.log_alpha)
    for k in (0, one.units // 2, one.units - 1):
        at = [one.log_alpha.tolist(), one.log_alpha.tolist()]
        at[0][k] += 1e-4
        at[1][k] -= 1e-4
        ahead, behind = (weight_by_weight(one, name, locations, strengths) for locations in at)
        assert found[k].item() == pytest.approx((ahead - behind) / 2e-4, rel=1e-3)


def test_open_gates_pay_for_all_gated_weights_and_for_no_bias() -> None:
    one = gated_again("lenet")
    with torch.no_grad():
        one.log_alpha.fill_(1e4)
    weights = sum(p.numel() for name, p in one.model.named_parameters() if name.endswith("weight"))
    assert Penalty(one, 1.0).pressure().item() == weights == 170
    with torch.no_grad():
        one.log_alpha.fill_(-1e4)
    assert Penalty(one, 1.0).pressure().item() == 0


def test_single_weights_pay_one_each() -> None:
    one = gated_again("residual", 1, "weights")
    assert one.units == 30 + 20 + 20 + 15
    wanted = sum(p_of(location) for location in one.log_alpha.tolist())
    assert Penalty(one, 2.0).pressure().item() == pytest.approx(2 * wanted, rel=1e-5)
    first = sum(p_of(location) for location in one.log_alpha.tolist()[:30])
    assert Penalty(one, {"stem": 2.0}).pressure().item() == pytest.approx(2 * first, rel=1e-5)


def test_layers_by_pattern() -> None:
    one = gated_again("lenet", 2)
    whole = [Penalty(one, {layer: 1.0}).pressure().item() for layer in layers("lenet")]
    assert Penalty(one, {"conv*": 1.0}).pressure().item() == pytest.approx(whole[0] + whole[1], rel=1e-5)
    both = Penalty(one, {"conv*": 1.0, "fc*": 3.0})
    assert both.pressure().item() == pytest.approx(whole[0] + whole[1] + 3 * (whole[2] + whole[3]), rel=1e-5)
    assert both.strengths == {"conv*": 1.0, "fc*": 3.0}


# ---- strengths -------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1e6), st.integers(1, 10**8))
@settings(max_examples=50, deadline=None)
def test_strengths_are_read_as_numbers_or_over_the_examples(number: float, examples: int) -> None:
    assert read_strength(number, None) == read_strength(str(number), examples) == number
    for text in (f"{number}/N", f" {number} / n ", f"{number}/n"):
        assert read_strength(text, examples) == number / examples


@pytest.mark.parametrize(
    "strength, examples, sentence",
    [
        ("0.1/N", None, "The strength '0.1/N' needs the number of training examples: Penalty(examples=...)"),
        ("0.1/N", 0, "needs the number of training examples"),
        (-1.0, None, "The strength -1.0 is no number at or above zero; write 1e-6 or 0.1/N"),
        ("-1/N", 10, "is no number at or above zero"),
        (math.nan, None, "The strength nan is no number"),
        (math.inf, None, "The strength inf is no number"),
        ("much", None, "The strength 'much' is no number"),
        ("/N", 10, "is no number at or above zero"),
        ("1/M", 10, "The strength '1/M' is no number"),
        ("1/N/N", 10, "needs the number of training examples"),
        (None, None, "The strength None is no number"),
        ([1.0], None, "The strength [1.0] is no number"),
        ({"conv1": "lots"}, None, "The strength 'lots' is no number"),
        ({"conv9": 1.0}, None, "names the layer 'conv9', which this model does not have; nearest: conv"),
    ],
)
def test_wrong_strengths_are_refused(strength: Any, examples: int | None, sentence: str) -> None:
    with pytest.raises(BudgetError, match=re.escape(sentence)):
        Penalty(gated_again("lenet"), strength, examples)


# ---- in a loop -------------------------------------------------------------------------------------------------------


def test_a_step_changes_nothing() -> None:
    one = gated_again("lenet", 3)
    penalty = Penalty(one, {"conv1": 0.1, "fc1": "2/N"}, examples=10)
    before, state = penalty.pressure(), {k: v.clone() for k, v in one.state_dict().items() if isinstance(v, Tensor)}
    for _ in range(3):
        assert penalty.step() is None  # type: ignore[func-returns-value]
    assert torch.equal(penalty.pressure(), before)
    assert all(torch.equal(one.state_dict()[key], value) for key, value in state.items())
    assert penalty.strengths == {"conv1": 0.1, "fc1": 0.2}


@pytest.mark.parametrize("noise", [True, False])
def test_fixed_gates_pay_nothing(noise: bool) -> None:
    torch.manual_seed(0)
    one = prunus.gate(Residual(), torch.randn(2, 6))
    penalty = Penalty(one, 1.0)
    assert penalty.pressure().item() > 1
    one.fix(noise)
    assert penalty.pressure().item() == 0
    assert not penalty.pressure().requires_grad
    penalty.step()


def test_a_stronger_penalty_leaves_a_smaller_network() -> None:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    y = x[:, :3] + x[:, 3:]
    sizes = []
    for strength in (0.0, 0.01, 1.0):
        torch.manual_seed(0)
        one = prunus.gate(Residual(), x)
        penalty = Penalty(one, strength)
        optimizer = torch.optim.Adam(
            [{"params": one.weight_parameters()}, {"params": [one.log_alpha], "lr": 0.1}], 0.02
        )
        for _ in range(80):
            loss = F.mse_loss(one(x), y) + penalty.pressure()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            penalty.step()
        sizes.append(one.deployed()["params"])
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[2] == 1 + 1 + 1 + 1 + 1 + 1 + 3 + 3  # a unit in every group
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # without a budget nothing lands
        small, _ = prunus.shrink(one, x, batches=())
    assert sum(p.numel() for p in small.parameters()) == sizes[2]
