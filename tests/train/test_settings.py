"""Settings: what is refused, and the epochs and rates they lead to."""

import json
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunus.errors import PrunusError
from prunus.train import Settings

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("epochs", [0, -1]),
        ("batch_size", [0, -64]),
        ("accumulate", [0, -2]),
        ("weight_lr", [0.0, -1e-3, NAN, INF]),
        ("gate_lr", [0.0, -1e-3, NAN, INF]),
        ("dual_rate", [0.0, -1.0, NAN, INF]),
        ("weight_decay", [-1e-9, NAN]),
        ("keep", [0.0, 1.0, -0.5, 1.5, NAN]),
        ("warm_up", [-0.1, 1.1, NAN]),
        ("polish", [-0.1, 1.0, 1.5, NAN]),
        ("ema", [0.0, 1.0, -0.9, 2.0, NAN]),
        ("method", ["l1", "", "L0"]),
        ("weight_schedule", ["linear", "", "Cosine"]),
        ("gate_schedule", ["linear", "", "step"]),
        ("precision", ["fp16", "bfloat16", "", "yes"]),
        ("log_every", [0, -5]),
    ],
)
def test_a_wrong_setting_is_refused_by_name_in_a_sentence(name: str, wrong: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(PrunusError) as caught:
            Settings(**{name: value})
        sentence = str(caught.value)
        assert name.replace("_", " ") in sentence.lower().replace("_", " "), sentence
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert "\n" not in sentence
        if name not in ("dual_rate", "log_every"):
            assert str(value) in sentence
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epochs": 1, "batch_size": 1, "accumulate": 1, "log_every": 1},
        {"warm_up": 0.0},
        {"warm_up": 1.0, "polish": 0.0},
        {"polish": 0.999, "ema": 0.999, "keep": 0.001, "weight_decay": 0.0},
        {"dual_rate": 1e-9, "weight_lr": 1e9, "gate_lr": 1e-9},
        {"weight_schedule": "constant", "gate_schedule": "cosine", "precision": "bf16", "dual": "expected"},
    ],
)
def test_what_lies_on_the_edge_is_taken(settings: dict[str, Any]) -> None:
    made = Settings(**settings)
    assert all(getattr(made, name) == value for name, value in settings.items())


@pytest.mark.parametrize("steps, rate", [(1, 0.5), (24, 0.5), (100, 0.12), (1200, 0.01), (6566, 0.01)])
def test_the_gates_are_quick_enough_to_close_in_a_short_run(steps: int, rate: float) -> None:
    assert Settings().gate_lr_for(steps) == pytest.approx(rate)
    assert Settings(gate_lr=0.03).gate_lr_for(steps) == 0.03


@pytest.mark.parametrize(
    "epochs, polish, expected",
    [(1, 0.0, 0), (1, 0.3, 0), (1, 0.99, 0), (2, 0.3, 1), (2, 0.99, 1), (3, 0.3, 1), (10, 0.3, 3), (20, 0.3, 6),
     (10, 0.99, 9), (100, 0.999, 99), (4, 0.0, 0), (7, 0.5, 4)],
)  # fmt: skip
def test_the_epochs_are_divided_between_the_budget_and_the_polish(epochs: int, polish: float, expected: int) -> None:
    settings = Settings(epochs=epochs, polish=polish)
    assert (settings.constrained_epochs, settings.polish_epochs) == (epochs - expected, expected)


@given(st.integers(1, 2000), st.floats(0, 1, exclude_max=True))
def test_no_polish_takes_all_epochs(epochs: int, polish: float) -> None:
    settings = Settings(epochs=epochs, polish=polish)
    assert settings.constrained_epochs >= 1
    assert settings.polish_epochs >= 0
    assert settings.constrained_epochs + settings.polish_epochs == epochs
    share = Fraction(polish) * epochs  # in exact arithmetic, half an epoch away at most unless all would go
    assert abs(settings.polish_epochs - share) <= Fraction(1, 2) + Fraction(1, 10**9) or settings.polish_epochs == (
        epochs - 1
    )


@given(st.integers(1, 300), st.floats(0, 1))
def test_the_cosine_is_one_for_half_the_run_and_then_half_a_wave(epochs: int, share: float) -> None:
    settings = Settings(epochs=epochs, weight_schedule="cosine", gate_schedule="cosine")
    at = share * epochs
    # cos^2 of a quarter wave: (1 + cos 2a) / 2 = cos^2 a.
    expected = 1.0 if share <= 0.5 else math.cos(math.pi * (share - 0.5)) ** 2
    assert settings.scale("weight", at) == pytest.approx(expected, abs=1e-12)
    assert settings.scale("gate", at) == settings.scale("weight", at)


def test_the_cosine_at_places_known_by_heart() -> None:
    settings = Settings(epochs=8, weight_schedule="cosine")
    found = [settings.scale("weight", at) for at in (0, 3.9, 4, 5, 6, 7, 8, 9)]
    assert found == pytest.approx([1, 1, 1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0, 0], abs=1e-12)
    assert min(found) >= 0


def test_weights_and_gates_have_schedules_of_their_own() -> None:
    settings = Settings(epochs=4, weight_schedule="cosine", gate_schedule="constant")
    other = Settings(epochs=4, weight_schedule="constant", gate_schedule="cosine")
    for at in (0.0, 1.0, 2.0, 2.5, 3.0, 3.99):
        assert settings.scale("gate", at) == other.scale("weight", at) == 1.0
        assert settings.scale("weight", at) == other.scale("gate", at)
    assert settings.scale("weight", 3.0) == pytest.approx(0.5)
    default = Settings()
    assert (default.scale("weight", 15.0), default.scale("gate", 15.0)) == (pytest.approx(0.5), 1.0)


def test_the_dual_rate_is_twenty_by_the_steps_unless_it_is_given() -> None:
    assert Settings().dual_rate_for(1000) == 0.02
    assert Settings().dual_rate_for(20) == 1.0
    assert Settings().dual_rate_for(0) == 20.0
    assert Settings(dual_rate=0.3).dual_rate_for(1000) == 0.3


def test_settings_survive_the_checkpoints_json() -> None:
    settings = Settings(epochs=7, ema=0.9, log_every=3, polish_noise=True)
    assert Settings(**json.loads(json.dumps(settings.as_dict()))) == settings
