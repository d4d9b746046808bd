"""The hard concrete distribution against scipy's quadrature, plain loops, closed forms and its own samples."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize  # type: ignore[import-untyped]

from prunus.gates import HardConcrete

GATES = [
    HardConcrete(),
    HardConcrete(beta=0.3, gamma=-0.5, zeta=1.2),
    HardConcrete(beta=1.0, gamma=-0.01, zeta=1.4),
    HardConcrete(beta=2.5, gamma=-0.2, zeta=1.05),
]
LOCATIONS = [-4.6, -1.0, 0.0, 0.7, 4.6]

gates = st.builds(
    HardConcrete,
    beta=st.floats(0.2, 3.0),
    gamma=st.floats(-1.0, -0.01),
    zeta=st.floats(1.01, 2.0),
)


def wide(value: float | list[float]) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def density_by_hand(gate: HardConcrete, x: float, log_alpha: float) -> float:
    """001, eq. 23 and 25, as printed."""
    width = gate.zeta - gate.gamma
    s, a, b = (x - gate.gamma) / width, math.exp(log_alpha), gate.beta
    top = b * a * s ** (-b - 1) * (1 - s) ** (-b - 1)
    return top / (a * s**-b + (1 - s) ** -b) ** 2 / width


def sample_by_hand(gate: HardConcrete, log_alpha: float, u: float) -> float:
    """001, eq. 10 and 11, as printed."""
    s = 1 / (1 + math.exp(-(math.log(u) - math.log(1 - u) + log_alpha) / gate.beta))
    return min(1.0, max(0.0, s * (gate.zeta - gate.gamma) + gate.gamma))


def expectation_in_closed_form(gate: HardConcrete, log_alpha: float) -> float:
    """E[z] at beta = 2/3, by residues.

    With x - gamma = t^3 (zeta - x), E[z] is the integral of 3 w a t^2 / ((a + t^2)(1 + t^3)^2), a = alpha and
    w = zeta - gamma. It has simple poles at +-i sqrt(a) and double ones at the cube roots r of -1, where it behaves as
    b / (t - r)^2 - 2 b r / (a + r^2) / (t - r), b = w a / (3 r^2 (a + r^2)).
    """
    a, w = math.exp(log_alpha), gate.zeta - gate.gamma
    start, end = (-gate.gamma / gate.zeta) ** (1 / 3), ((1 - gate.gamma) / (gate.zeta - 1)) ** (1 / 3)

    def log_ratio(pole: complex) -> complex:
        return complex(np.log(end - pole) - np.log(start - pole))

    total = 0j
    for pole in (1j * math.sqrt(a), -1j * math.sqrt(a)):
        total += 3 * w * a * pole / 2 / (1 + pole**3) ** 2 * log_ratio(pole)
    for root in (-1 + 0j, complex(np.exp(1j * np.pi / 3)), complex(np.exp(-1j * np.pi / 3))):
        b = w * a / (3 * root**2 * (a + root**2))
        total += b * (1 / (start - root) - 1 / (end - root)) - 2 * b * root / (a + root**2) * log_ratio(root)
    return total.real


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("log_alpha", LOCATIONS)
def test_density_is_the_printed_one_and_integrates_to_one(gate: HardConcrete, log_alpha: float) -> None:
    location = wide(log_alpha)
    for x in np.linspace(gate.gamma, gate.zeta, 9)[1:-1]:
        assert gate.pdf(wide(x), location).item() == pytest.approx(density_by_hand(gate, x, log_alpha), rel=1e-12)

    # The ends are singular: integrate over y = logit(s), where x = gamma + width s and dx = width s (1 - s) dy.
    width = gate.zeta - gate.gamma

    def mass(y: float) -> float:
        s = 1 / (1 + math.exp(-y))
        return gate.pdf(wide(gate.gamma + width * s), location).item() * width * s * (1 - s)

    # Beyond +-20, x - gamma is mostly rounding: there stands eq. 24, in y. It is little but for the coldest gates.
    tails = sum(1 / (1 + math.exp(gate.beta * 20 + sign * log_alpha)) for sign in (-1, 1))
    middle = max(-19.0, min(19.0, log_alpha / gate.beta))
    found = integrate.quad(mass, -20, 20, points=[middle], epsabs=1e-9, limit=200)[0]
    assert found + tails == pytest.approx(1, abs=1e-6)
    assert tails < 1e-3 or gate.beta < 0.5


@pytest.mark.parametrize("gate", GATES)
def test_cdf_is_the_integral_of_the_density(gate: HardConcrete) -> None:
    for log_alpha in LOCATIONS:
        location = wide(log_alpha)
        for low, high in [(0.0, 0.3), (0.3, 0.99), (0.0, 1.0)]:
            area = integrate.quad(lambda x, at=log_alpha: density_by_hand(gate, x, at), low, high)[0]
            rise = gate.cdf(wide(high), location) - gate.cdf(wide(low), location)
            assert rise.item() == pytest.approx(area, abs=1e-8)


def test_outside_the_support() -> None:
    gate, x = HardConcrete(), torch.tensor([-5.0, -0.1, 1.1, 5.0], requires_grad=True)
    log_alpha = torch.tensor(0.3, requires_grad=True)
    assert gate.cdf(x, log_alpha).tolist() == [0, 0, 1, 1]
    assert gate.pdf(x, log_alpha).tolist() == [0, 0, 0, 0]
    (gate.cdf(x, log_alpha) + gate.pdf(x, log_alpha)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 0, 0]
    assert log_alpha.grad == 0
    assert gate.cdf(torch.tensor(math.nan), log_alpha).isnan()
    assert gate.quantile(torch.tensor([0.0, 1.0]), log_alpha).tolist() == pytest.approx([-0.1, 1.1])


@given(gates, st.floats(0.001, 0.999), st.floats(-5, 5))
@settings(max_examples=100, deadline=None)
def test_quantile_inverts_the_cdf(gate: HardConcrete, u: float, log_alpha: float) -> None:
    x = gate.quantile(wide(u), wide(log_alpha))
    # s rounds near the ends of the support, and logit turns eps of s into eps / (s (1 - s)): keep clear of them.
    assume(min(x.item() - gate.gamma, gate.zeta - x.item()) > 1e-6)
    assert gate.cdf(x, wide(log_alpha)).item() == pytest.approx(u, rel=1e-6)


@given(gates, st.floats(1e-6, 1 - 1e-6), st.floats(-8, 8))
@settings(max_examples=100, deadline=None)
def test_sample_equals_the_plain_formula(gate: HardConcrete, u: float, log_alpha: float) -> None:
    assert gate.sample(wide(log_alpha), wide(u)).item() == pytest.approx(sample_by_hand(gate, log_alpha, u), abs=1e-12)


def test_sample_equals_a_plain_loop() -> None:
    gate, draw = HardConcrete(), random.Random(0)
    log_alpha = [draw.uniform(-4, 4) for _ in range(200)]
    noise = [draw.random() for _ in range(200)]
    expected = [sample_by_hand(gate, a, u) for a, u in zip(log_alpha, noise, strict=True)]
    assert gate.sample(wide(log_alpha), wide(noise)).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("log_alpha", [-2.0, 0.0, 1.5])
def test_samples_follow_the_law(gate: HardConcrete, log_alpha: float) -> None:
    count = 40_000
    noise = torch.rand(count, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    location = wide(log_alpha)
    z = gate.sample(location, noise)
    slack = 4.5 / (2 * math.sqrt(count))  # 4.5 standard errors of a fraction, at its largest
    for x in (0.1, 0.5, 0.9):
        assert (z <= x).double().mean().item() == pytest.approx(gate.cdf(wide(x), location).item(), abs=slack)
    assert (z != 0).double().mean().item() == pytest.approx(gate.p_active(location).item(), abs=slack)
    assert (z == 1).double().mean().item() == pytest.approx(gate.p_one(location).item(), abs=slack)
    assert z.mean().item() == pytest.approx(gate.expectation(location).item(), abs=slack)


@pytest.mark.parametrize("gate", GATES)
def test_point_masses_are_the_cdf_at_the_ends(gate: HardConcrete) -> None:
    log_alpha = torch.linspace(-6, 6, 25, dtype=torch.float64)
    torch.testing.assert_close(gate.p_active(log_alpha), 1 - gate.cdf(wide(0.0), log_alpha))
    torch.testing.assert_close(gate.p_one(log_alpha), 1 - gate.cdf(wide(1.0), log_alpha))


@pytest.mark.parametrize("gate", [*GATES, HardConcrete(gamma=-1e-4, zeta=1.0001), HardConcrete(beta=20.0)])
@pytest.mark.parametrize("log_alpha", [-12.0, -3.0, 0.0, 2.0, 9.0])
def test_expectation_equals_scipys(gate: HardConcrete, log_alpha: float) -> None:
    def tail(x: float) -> float:
        t = log_alpha - gate.beta * (math.log(x - gate.gamma) - math.log(gate.zeta - x))
        return 1 / (1 + math.exp(-t))

    step = min(max(gate.quantile(wide(0.5), wide(log_alpha)).item(), 0.0), 1.0)
    parts = [integrate.quad(tail, a, b, epsabs=0, epsrel=1e-12, limit=400)[0] for a, b in ((0, step), (step, 1))]
    assert gate.expectation(wide(log_alpha)).item() == pytest.approx(sum(parts), rel=1e-10)


@given(st.floats(-9, 9), st.floats(-0.5, -0.02), st.floats(1.02, 1.5))
@settings(max_examples=100, deadline=None)
def test_expectation_equals_the_closed_form(log_alpha: float, gamma: float, zeta: float) -> None:
    gate = HardConcrete(gamma=gamma, zeta=zeta)
    found = gate.expectation(wide(log_alpha)).item()
    assert found == pytest.approx(expectation_in_closed_form(gate, log_alpha), abs=1e-11)


def test_expectation_at_the_extremes() -> None:
    gate = HardConcrete()
    assert gate.expectation(torch.tensor([-200.0, 200.0])).tolist() == [0, 1]
    tiny = gate.expectation(wide([-40.0, -60.0]))
    assert (tiny[0] / tiny[1]).item() == pytest.approx(math.exp(20), rel=1e-12)  # it goes as alpha, down to any size
    narrow = gate.expectation(torch.linspace(-5, 5, 11))
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), gate.expectation(torch.linspace(-5, 5, 11).double()), rtol=1e-6, atol=0)


def test_gradients() -> None:
    gate = HardConcrete()
    log_alpha = wide([-1.3, -0.2, 0.1, 1.2]).requires_grad_()
    x = wide([0.05, 0.4, 0.6, 0.95]).requires_grad_()
    noise = wide([0.6, 0.4, 0.5, 0.3])
    for method in (gate.pdf, gate.cdf, gate.quantile):
        assert torch.autograd.gradcheck(method, (x, log_alpha))
    for statistic in (gate.p_active, gate.p_one, gate.expectation, gate.median, gate.noiseless):
        assert torch.autograd.gradcheck(statistic, (log_alpha,))
    z = gate.sample(log_alpha, noise)
    assert ((z > 0) & (z < 1)).all()
    assert torch.autograd.gradcheck(gate.sample, (log_alpha, noise))


@given(gates, st.floats(-6, 6))
@settings(max_examples=200, deadline=None)
def test_median_is_the_half_quantile_and_open_where_activity_is_likely(gate: HardConcrete, log_alpha: float) -> None:
    location = wide(log_alpha)
    median = gate.median(location)
    assert median.item() == pytest.approx(min(1.0, max(0.0, gate.quantile(wide(0.5), location).item())), abs=1e-12)
    assume(abs(log_alpha - gate.threshold()) > 1e-9)
    assert (median > 0) == (gate.p_active(location) > 0.5)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("how", ["median", "noiseless"])
def test_threshold_by_bisection(gate: HardConcrete, how: str) -> None:
    def before_clamp(log_alpha: float) -> float:
        slope = 1 / gate.beta if how == "median" else 1.0
        return (gate.zeta - gate.gamma) / (1 + math.exp(-log_alpha * slope)) + gate.gamma

    threshold = gate.threshold(how)  # type: ignore[arg-type]
    assert threshold == pytest.approx(optimize.bisect(before_clamp, -30, 30, xtol=1e-12), abs=1e-9)
    estimate = gate.estimate(wide([threshold - 1e-6, threshold + 1e-6]), how)  # type: ignore[arg-type]
    assert estimate[0] == 0
    assert estimate[1] > 0


def test_estimates_by_name() -> None:
    gate, log_alpha = HardConcrete(), torch.linspace(-5, 5, 21)
    assert torch.equal(gate.estimate(log_alpha), gate.median(log_alpha))
    assert torch.equal(gate.estimate(log_alpha, "noiseless"), gate.noiseless(log_alpha))
    assert not torch.equal(gate.median(log_alpha), gate.noiseless(log_alpha))
    plain = [min(1, max(0, 1.2 / (1 + math.exp(-a)) - 0.1)) for a in log_alpha.tolist()]
    assert gate.noiseless(log_alpha).tolist() == pytest.approx(plain, abs=1e-6)
    with pytest.raises(ValueError, match="'median' or 'noiseless', not 'mean'"):
        gate.estimate(log_alpha, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'median' or 'noiseless'"):
        gate.threshold("mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("gate", GATES)
def test_extremes_are_finite_in_float32(gate: HardConcrete) -> None:
    log_alpha = torch.tensor([-80.0, -5.0, 0.0, 5.0, 80.0], requires_grad=True)
    noise = torch.tensor([0.0, 1e-38, 1e-7, 0.5, 1 - 2**-24, 1.0])
    x = torch.tensor([-0.009, 0.0, 0.5, 1.0, 1.04])
    answers = [
        gate.sample(log_alpha[:, None], noise),
        gate.quantile(noise[:, None], log_alpha),
        gate.pdf(x[:, None], log_alpha),
        gate.cdf(x[:, None], log_alpha),
        gate.p_active(log_alpha),
        gate.p_one(log_alpha),
        gate.expectation(log_alpha),
        gate.median(log_alpha),
        gate.noiseless(log_alpha),
    ]
    for answer in answers:
        assert answer.dtype == torch.float32
        assert answer.isfinite().all()
        (gradient,) = torch.autograd.grad(answer.sum(), log_alpha, retain_graph=True)
        assert gradient.isfinite().all()
    assert (answers[0][:, 0] == 0).all()
    assert (answers[0][:, -1] == 1).all()


def test_clamp_is_unseen_by_autograd() -> None:
    gate, log_alpha = HardConcrete(), torch.tensor([-9.0, 0.5, 9.0], requires_grad=True)
    loss = gate.p_active(log_alpha).sum()
    version = log_alpha._version
    assert gate.clamp_(log_alpha) is log_alpha
    assert log_alpha._version == version
    assert log_alpha.tolist() == pytest.approx([math.log(1e-2), 0.5, math.log(1e2)])
    loss.backward()
    assert log_alpha.grad is not None


def test_location_of_a_keep_probability() -> None:
    gate = HardConcrete()
    for keep in (0.01, 0.2, 0.5, 0.8, 0.99):
        location = wide(gate.locate(keep))
        assert torch.sigmoid(location).item() == pytest.approx(keep)
        assert 1 - gate.cdf(wide(0.5), location).item() == pytest.approx(keep)
        assert gate.p_active(location) > keep
    for keep in (0.0, 1.0, -0.5, math.nan):
        with pytest.raises(ValueError, match="strictly between 0 and 1"):
            gate.locate(keep)


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"beta": 0.0}, "beta must be positive"),
        ({"beta": math.nan}, "beta must be positive"),
        ({"gamma": 0.0}, "begin below 0"),
        ({"gamma": -math.inf}, "begin below 0"),
        ({"zeta": 1.0}, "end above 1"),
        ({"low": 1.0, "high": 1.0}, "in order"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        HardConcrete(**wrong)


def test_it_is_a_value() -> None:
    assert HardConcrete() == HardConcrete(beta=2 / 3)
    assert hash(HardConcrete()) == hash(HardConcrete())
    assert HardConcrete() != HardConcrete(beta=0.5)


def test_whole_step_compiles_without_a_break() -> None:
    gate = HardConcrete()

    @torch.compile(fullgraph=True, backend="eager")
    def step(log_alpha: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return (gate.sample(log_alpha, noise) + gate.p_active(log_alpha) + gate.expectation(log_alpha)).sum()

    log_alpha, noise = torch.linspace(-2, 2, 5), torch.full((5,), 0.4)
    eager = gate.sample(log_alpha, noise) + gate.p_active(log_alpha) + gate.expectation(log_alpha)
    torch.testing.assert_close(step(log_alpha, noise), eager.sum())
