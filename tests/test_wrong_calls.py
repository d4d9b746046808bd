"""Mistakes in calls, each one plain sentence of a PrunusError: never another library's words, never nothing."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cooper.formulations import AugmentedLagrangian, QuadraticPenalty
from cooper.penalty_coefficients import DensePenaltyCoefficient
from torch import Tensor, nn

import prunus

X = torch.randn(4, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 2))


def coefficient(size: int) -> DensePenaltyCoefficient:
    return DensePenaltyCoefficient(torch.ones(size))


def gated() -> prunus.Gated:
    return prunus.gate(model(), X)


def budget(**options: Any) -> prunus.Budget:
    return prunus.Budget(gated(), **{"params": 0.5, **options})


def with_nan() -> nn.Module:
    broken = model()
    with torch.no_grad():
        broken.get_parameter("2.weight")[0, 0] = torch.nan
    return broken


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "budget of a model": (lambda: prunus.Budget(model(), params=0.5), "this is a Sequential"),
    "penalty of a model": (lambda: prunus.Penalty(model(), 0.1), "this is a Sequential"),
    "shrinking a model": (lambda: prunus.shrink(model(), X), "this is a Sequential"),
    "landing a model": (lambda: prunus.land(model()), "this is a Sequential"),
    "gating a gated model": (lambda: prunus.gate(gated(), X), "carries gates already"),
    "gating a number": (lambda: prunus.gate(3, X), "must be a torch.nn.Module"),
    "keep 0": (lambda: prunus.gate(model(), X, keep=0), "strictly between 0 and 1: 0.0 does not"),
    "keep nan": (lambda: prunus.gate(model(), X, keep=float("nan")), "strictly between 0 and 1: nan does not"),
    "keep as text": (lambda: prunus.gate(model(), X, keep="0.5"), "keep is '0.5'"),
    "an estimate": (lambda: prunus.gate(model(), X, estimate="mean"), "'median' or 'noiseless', not 'mean'"),
    "a distribution": (lambda: prunus.gate(model(), X, gates=3), "is a prunus.HardConcrete"),
    "a temperature": (lambda: prunus.HardConcrete(beta=-1), "beta must be positive and finite, not -1"),
    "no examples": (lambda: prunus.gate(model(), X[:0]), "An example input is empty, of shape (0, 8)"),
    "inputs of another type": (lambda: prunus.gate(model(), X.double()), "cannot take these example inputs"),
    "lazy layers": (lambda: prunus.gate(nn.Sequential(nn.LazyLinear(3)), X), "lazy layers that were never run"),
    "a wrapper": (lambda: prunus.gate(nn.DataParallel(model()), X), "wrapped in DataParallel"),
    "weights that are no numbers": (lambda: prunus.gate(with_nan(), X), "The weight 2.weight holds NaN"),
    "a pattern that is a number": (lambda: prunus.gate(model(), X, only=3), "only holds 3"),
    "a pattern that names nothing": (lambda: prunus.gate(model(), X, freeze="fc1"), "No group matches 'fc1'"),
    "a kind of unit": (lambda: prunus.gate(model(), X, units="x"), "units='x' is not a kind of unit"),
    "shrinking on other inputs": (lambda: prunus.shrink(gated(), X[:, 1:]), "cannot take these example inputs"),
    "shrinking on nothing": (lambda: prunus.shrink(gated(), None), "cannot take these example inputs"),
    "a rate that is text": (lambda: budget(dual_rate="x"), "dual_rate='x' must be above zero"),
    "a layer that is a number": (lambda: budget(layers={0: 0.5}), "layers names the layer 0"),
    "a formulation that is none": (lambda: budget(formulation=3), "formulation is 3"),
    "a coefficient that is missing": (lambda: budget(formulation=AugmentedLagrangian), "needs a penalty coefficient"),
    "a coefficient too many": (lambda: budget(penalty=coefficient(1)), "takes no penalty coefficient"),
    "a formulation without multipliers": (
        lambda: budget(formulation=QuadraticPenalty, penalty=coefficient(1)), "knows no multipliers"
    ),
    "coefficients for other limits": (
        lambda: budget(formulation=AugmentedLagrangian, penalty=coefficient(3)), "has 3 entries for 1 limits"
    ),
    "a state that is empty": (lambda: budget().load_state_dict({}), "not the state of a budget of 1 limits"),
    "another budget's state": (
        lambda: budget().load_state_dict({"multiplier": torch.zeros(4)}), "not the state of a budget of 1 limits"
    ),
    "progress as text": (lambda: budget().tighten("a"), "from 0 to 1, not 'a'"),
    "no number of examples": (lambda: prunus.Penalty(gated(), "0.1/N", examples=-5), "number of training examples"),
    "no strength": (lambda: prunus.Penalty(gated(), {}), "A penalty needs a strength"),
    "an optimizer that is none": (lambda: prunus.ExtrapolationFromThePast(3), "this is a int"),
    "a file that is not there": (lambda: prunus.load(model(), "/none/small.safetensors"), "There is no file"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_it_is_said_in_a_sentence(name: str) -> None:
    call, words = CALLS[name]
    with pytest.raises(prunus.PrunusError) as caught:
        call()
    assert words in str(caught.value)
    assert str(caught.value).endswith(".")


def test_what_looks_wrong_and_is_right() -> None:
    assert str(prunus.Budget(gated(), params=np.float32(0.5))) == "Budget(params=50%)"
    assert str(prunus.Budget(gated(), params=np.int64(50))) == "Budget(params=50)"
    assert prunus.gate(model(), X, only="0").graph.sizes == {"0.inputs": 8, "0": 10}
    assert prunus.gate(model(), X, freeze="0").graph.sizes == {}
    _, receipt = prunus.shrink(gated(), X, batches=2)
    assert list(receipt["deployed"]["latency_ms"]) == ["2"]


def test_gating_a_model_again_says_that_it_is_rescaled_again() -> None:
    one = model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prunus.gate(one, X, rescale=False)
        prunus.gate(one, X)
        prunus.gate(one, X, rescale=False)
    with pytest.warns(UserWarning, match="gated before"):
        prunus.gate(one, X)


def test_penalties_are_not_cast_under_autocast() -> None:
    one = gated()
    penalty = prunus.Penalty(one, 0.01)
    plain: Tensor = penalty.pressure()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(penalty.pressure(), plain)
