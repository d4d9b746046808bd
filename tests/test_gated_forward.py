"""What the gated model computes: gates at the readers' inputs, one sample a step or an example, equal to its slice."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from prunus.axes import Keep
from prunus.cost import Row
from prunus.errors import ModelError
from prunus.gated import Gated
from prunus.gates import HardConcrete
from prunus.graph import analyse
from prunus.surgery import check, slice_model
from prunus.surgery.verify import max_rel_diff
from prunus.terms import Both, spread

PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Lenet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 5, 3)
        self.fc1, self.fc2 = nn.Linear(5 * 4, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv2(self.conv1(x).sigmoid()).relu(), 2)
        return self.fc2(torch.sigmoid(self.fc1(x.flatten(1))))


class Residual(nn.Module):
    """Batch norms with biases of their own between gate and reader, a sigmoid, and depthwise and grouped layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.deep, self.bn1 = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.BatchNorm2d(6)
        self.point, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 4, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn0(self.stem(x))
        x = x + self.bn2(self.point(torch.sigmoid(self.bn1(self.deep(x)))))
        return self.head(torch.sigmoid(self.up(torch.sigmoid(self.grouped(x)))).mean((2, 3)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Sigmoid(), nn.Linear(6, 5), nn.Linear(5, 3))


def branches() -> nn.Module:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.fc = nn.Conv2d(1, 2, 7), nn.Conv2d(1, 3, 7), nn.Linear(20, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.cat([self.a(x).flatten(1), self.b(x).flatten(1)], 1))

    return Branches()


MODELS = {"lenet": Lenet, "residual": Residual, "mlp": mlp, "branches": branches}


def images(batch: int = 4) -> Tensor:
    return torch.randn(batch, 1, 8, 8, generator=torch.Generator().manual_seed(2))


def gated(name: str, units: str = "structured", seed: int = 0, **options: Any) -> Gated:
    torch.manual_seed(seed)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return Gated(model, analyse(model, (images(),), units=units), **options)


def scatter(model: Gated, seed: int, shift: float = 0.0) -> Gated:
    """Locations all over their range, so that gates are closed, half open and open."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.log_alpha.copy_(6 * torch.rand(model.units, generator=generator) - 4 + shift)
    return model


# ---- one sample, or one an example -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("units", ["structured", "groups"])
def test_one_example_alone_equals_the_single_sample(name: str, units: str) -> None:
    one = gated(name, units).double().train()
    for norm in one.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eval()
    x = images(1).double()
    scatter(one, 1)
    for seed in range(3):
        torch.manual_seed(seed)
        single = one(x)
        one.per_example = True
        torch.manual_seed(seed)
        each = one(x)
        one.per_example = False
        assert max_rel_diff([single], [each]) < 1e-12


def test_every_example_has_a_sample_of_its_own() -> None:
    model = scatter(gated("lenet", per_example=True), 1).double().train()
    x = images(3).double()
    torch.manual_seed(5)
    noise = model.sample(3)
    torch.manual_seed(5)
    together = model(x)
    assert not torch.equal(noise[0], noise[1])
    for k in range(3):
        weights = model._multiplied(noise[k])
        alone = torch.func.functional_call(model.model, weights, (x[k : k + 1],))
        assert max_rel_diff([alone], [together[k : k + 1]]) < 1e-12


def test_per_example_gates_have_the_same_gradient_as_the_single_sample() -> None:
    model = gated("residual").double().train()
    with torch.no_grad():
        model.log_alpha.fill_(0.0)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eval()
    found = []
    for per_example in (False, True):
        model.per_example = per_example
        model.zero_grad()
        torch.manual_seed(1)
        model(images(1).double()).square().sum().backward()
        assert model.log_alpha.grad is not None
        found.append([model.log_alpha.grad.clone(), model.model.get_parameter("stem.weight").grad.clone()])
    assert max_rel_diff(found[0], found[1]) < 1e-12
    assert found[0][0].abs().max() > 0


def test_per_example_needs_the_batch_in_front() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x.reshape(-1, 4)))

    x = torch.randn(2, 3, 4)
    model = Folded()
    one = Gated(model, analyse(model, (x,)), per_example=True)
    with pytest.raises(ModelError, match=r"there it has 6 entries for 2 examples"):
        one.train()(x)
    assert one.eval()(x).shape == (6, 3)


def test_per_example_and_single_weights_exclude_each_other() -> None:
    with pytest.raises(ModelError, match="not for weights or blocks where they stand"):
        gated("mlp", "weights", per_example=True)


# ---- the user's model stays the user's -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_keys_of_the_users_model_stay(name: str) -> None:
    dense = MODELS[name]()
    one = gated(name)
    assert list(one.model.state_dict()) == list(dense.state_dict())
    assert set(one.state_dict()) == {f"model.{key}" for key in dense.state_dict()} | {"log_alpha", "_extra_state"}
    assert [name for name, _ in one.named_parameters()] == ["log_alpha"] + [
        f"model.{name}" for name, _ in dense.named_parameters()
    ]
    one.train()(images())
    assert all(a is b for a, b in zip(one.weight_parameters(), one.model.parameters(), strict=True))


def test_batch_norms_learn_their_statistics() -> None:
    for per_example in (False, True):
        one = gated("residual", per_example=per_example).train()
        norm = one.model.get_submodule("bn0")
        before = norm.running_mean.clone()
        one(images())
        assert norm.num_batches_tracked == 1
        assert not torch.equal(norm.running_mean, before)
        one.eval()(images())
        assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keep", [0.5, 0.8])
def test_rescaling_keeps_the_dense_scale(name: str, keep: float) -> None:
    torch.manual_seed(0)
    dense = MODELS[name]()
    torch.manual_seed(0)
    model = MODELS[name]()
    graph = analyse(model, (images(),))
    one = Gated(model, graph, keep=keep)
    undone = one._multiplied(torch.full((one.units,), keep))
    assert set(undone) == {axis.tensor for group in graph.groups for axis in group.consumers}
    for tensor, weight in undone.items():
        assert torch.allclose(weight, dense.get_parameter(tensor), rtol=1e-5)
        assert not torch.allclose(model.get_parameter(tensor), dense.get_parameter(tensor), rtol=1e-2)
    assert torch.allclose(one.eval().model(images()), Gated(model, graph, keep=keep, rescale=False).model(images()))


def test_without_rescaling_the_weights_are_the_users() -> None:
    torch.manual_seed(0)
    dense = Lenet()
    one = gated("lenet", rescale=False)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), dense.parameters(), strict=True))


def test_keep_probabilities_by_pattern() -> None:
    one = gated("lenet", keep={"*": 0.5, "fc1*": 0.8, "conv1": 0.3})
    parts = dict(zip(one.graph.sizes, one.log_alpha.split(list(one.graph.sizes.values())), strict=True))
    for name, keep in {"conv1": 0.3, "conv2": 0.5, "fc1.inputs": 0.8, "fc1": 0.8}.items():
        assert parts[name].mean().item() == pytest.approx(math.log(keep / (1 - keep)), abs=0.05)
    with pytest.raises(ModelError, match="keep: no group matches 'conv9'; nearest: conv"):
        gated("lenet", keep={"conv9": 0.5})
    for bad in (0.0, 1.0, -1):
        with pytest.raises(ValueError, match="initial keep probability"):
            gated("lenet", keep=bad)


# ---- equal to its slice ----------------------------------------------------------------------------------------------


def shrunk(one: Gated) -> nn.Module:
    return slice_model(one.model, one.graph, one.keep(), one.fold())


@given(st.sampled_from(["lenet", "residual", "mlp"]), st.sampled_from(["structured", "groups"]), st.integers(0, 999))
@settings(max_examples=25, deadline=None, phases=PHASES)
def test_in_evaluation_the_gated_model_equals_its_slice(name: str, units: str, seed: int) -> None:
    one = scatter(gated(name, units, seed), seed).double().eval()
    small = shrunk(one).eval()
    x = images().double()
    assert max_rel_diff([one(x)], [small(x)]) < 1e-12
    result = check(one.model, one.fold(), small, x)
    assert result["ok"]


@pytest.mark.parametrize("name", ["lenet", "residual", "mlp"])
def test_a_closed_unit_leaves_its_constant_behind_nowhere(name: str) -> None:
    """sigmoid(0) = 0.5 and a batch norm's bias would pass a gate at the producer; at the reader nothing does."""
    one = gated(name).double().eval()
    x = images().double()
    for group in one.graph.groups:
        with torch.no_grad():
            one.log_alpha.fill_(4.0)
            start = one.cost.offsets[group.name]
            one.log_alpha[start : start + group.size - 1] = -4.0
        assert int(one.test_gates().count_nonzero()) == one.units - group.size + 1
        small = shrunk(one).eval()
        assert one.keep().kept()[group.name] == [group.size - 1]
        assert max_rel_diff([one(x)], [small(x)]) < 1e-12
    with torch.no_grad():  # and the constants are there: without the readers' gates the outputs differ
        assert max_rel_diff([one(x)], [one.model(x)]) > 1e-3


def test_a_group_whose_gates_are_all_closed_keeps_its_best_unit_unread() -> None:
    one = gated("lenet").double().eval()
    with torch.no_grad():
        one.log_alpha.fill_(4.0)
        start = one.cost.offsets["conv2"]
        one.log_alpha[start : start + 5] = torch.tensor([-4.0, -3.0, -2.5, -3.0, -4.0])
    assert one.keep().kept()["conv2"] == [2]
    x = images().double()
    assert max_rel_diff([one(x)], [shrunk(one).eval()(x)]) < 1e-12


def test_single_weights_become_zeros() -> None:
    one = scatter(gated("lenet", "weights"), 2).double().eval()
    small = shrunk(one).eval()
    x = images().double()
    assert max_rel_diff([one(x)], [small(x)]) == 0
    zeros = sum(int((small.get_parameter(name) == 0).sum()) for name in one.graph.scattered)
    assert zeros == int((one.test_gates() == 0).sum()) > 0
    one.train()
    torch.manual_seed(1)
    out = one(x)
    torch.manual_seed(1)
    z = one.sample()
    start = one.cost.offsets["fc2.weight"]
    weight = one._multiplied(z)["fc2.weight"]
    assert torch.equal(weight, one.model.get_parameter("fc2.weight") * z[start : start + 21].view(3, 7))
    assert out.shape == (4, 3)


# ---- which units are open --------------------------------------------------------------------------------------------


def open_slowly(one: Gated) -> dict[str, set[int]]:
    """By plain loops: gates above the threshold, finer ones under open bases; of an empty group the best one unit."""
    sizes, raw = one.graph.sizes, {}
    fine = {both.fine.group: both for _, both in one.graph.fine_axes()}
    gates = {n: one.log_alpha[one.cost.offsets[n] :][:size].tolist() for n, size in sizes.items()}

    def open_positions(both: Both, units: dict[str, set[int]]) -> list[int]:
        masks = {n: torch.tensor([k in units[n] for k in range(sizes[n])]) for n in units if n not in fine}
        return spread(both.base, masks).nonzero().flatten().tolist()

    for name in sizes:
        raw[name] = {k for k, a in enumerate(gates[name]) if a > one.threshold}
    units = {n: kept or {max(range(sizes[n]), key=lambda k, n=n: gates[n][k])} for n, kept in raw.items()}
    for name, both in fine.items():
        units[name] = raw[name] & set(open_positions(both, raw))
        if not units[name]:
            units[name] = {max(open_positions(both, units), key=lambda k, n=name: gates[n][k])}
    return units


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shift", [-6.0, -2.0, 0.0])
def test_open_units_agree_with_a_plain_loop_and_are_closed(name: str, shift: float) -> None:
    for units, seed in itertools.product(("structured", "groups"), range(6)):
        one = scatter(gated(name, units, seed), seed, shift)
        keep = one.keep()
        assert keep == keep.closed()
        assert all(mask.any() for mask in keep.units.values())
        slow = {n: torch.tensor([k in kept for k in range(one.graph.sizes[n])]) for n, kept in open_slowly(one).items()}
        assert keep == Keep(one.graph, slow).closed()
        assert one.deployed() == one.cost.of(keep)
        assert torch.equal(one.open_units(one.log_alpha.detach().clone()), one.open_units())


def test_equal_gates_are_told_apart() -> None:
    one = gated("mlp", "groups")
    with torch.no_grad():
        one.log_alpha.fill_(-4.0)
    assert one.keep().kept() == {"1": [0], "3": [0]}
    with torch.no_grad():
        one.log_alpha.fill_(4.0)
    assert one.deployed() == one.cost.dense()


def test_nested_finer_gates_multiply() -> None:
    one = scatter(gated("lenet"), 4).double()
    term = one.graph.axes["fc1.weight"][1]
    assert isinstance(term, Both)
    z = torch.rand(one.units, dtype=torch.float64)
    maps, fine = z[one.cost.offsets["conv2"] :][:5], z[one.cost.offsets["fc1.inputs"] :][:20]
    weight = one.model.get_parameter("fc1.weight")
    wanted = torch.stack([weight[:, k] * maps[k // 4] * fine[k] for k in range(20)], 1)
    assert torch.allclose(one._multiplied(z)["fc1.weight"], wanted)
    p = one.p_active()
    maps, fine = p[one.cost.offsets["conv2"] :][:5], p[one.cost.offsets["fc1.inputs"] :][:20]
    rest = p[one.cost.offsets["fc1"] :][:7].sum()
    weights = rest * sum(maps[k // 4] * fine[k] for k in range(20))
    found = one.cost.rows([(Row("params"), lambda tensor: tensor == "fc1.weight")])(p)
    assert found.item() == pytest.approx(weights.item(), rel=1e-9)


def test_masked_gates_stay_closed() -> None:
    one = scatter(gated("lenet"), 6)
    kept = one.keep()
    one.fix(noise=True)
    with torch.no_grad():
        one.log_alpha.fill_(4.0)
    assert one.fixed
    assert one.keep() == kept
    assert not one.log_alpha.requires_grad
    assert torch.equal(one.sample() > 0, one.open_units() > 0)
    state = one.state_dict()
    again = gated("lenet")
    again.load_state_dict(state)
    assert again.keep() == kept
    assert again.fixed


@pytest.mark.parametrize("seed", range(4))
def test_fixed_gates_equal_their_slice_too(seed: int) -> None:
    one = scatter(gated("residual", seed=seed), seed).double().eval()
    one.fix(noise=False)
    x = images().double()
    assert max_rel_diff([one(x)], [shrunk(one).eval()(x)]) < 1e-12
    assert max_rel_diff([one.train().eval()(x)], [one(x)]) == 0


def test_closing_units_for_good() -> None:
    one = gated("mlp", "groups")
    with torch.no_grad():
        one.log_alpha.fill_(3.0)
    units = torch.zeros(one.units, dtype=torch.bool)
    units[:4] = True
    one.close(units)
    assert one.keep().kept() == {"1": [4, 5], "3": [0, 1, 2, 3, 4]}


def test_the_expected_cost_is_that_of_the_gates() -> None:
    one = scatter(gated("residual"), 1)
    gates = HardConcrete()
    torch.manual_seed(0)
    log_alpha = one.log_alpha.detach()
    samples = torch.stack([(gates.sample(log_alpha, torch.rand(one.units)) > 0).double() for _ in range(4000)])
    values = one.cost.whole(samples)
    total = values.mean(0)
    for (what, expected), mean, error in zip(one.expected().items(), total, values.std(0) / 4000**0.5, strict=True):
        assert abs(expected - mean.item()) < 4.5 * error.item(), what


def test_the_noiseless_estimate_has_its_own_threshold() -> None:
    one = scatter(gated("lenet", estimate="noiseless"), 3).double().eval()
    x = images().double()
    assert max_rel_diff([one(x)], [shrunk(one).eval()(x)]) < 1e-12
    open_ = one.test_gates() > 0
    assert one.threshold < HardConcrete().threshold("median")
    assert torch.equal(open_, one.log_alpha > one.threshold)


def test_a_model_with_nothing_to_shrink_passes_through() -> None:
    model = nn.Linear(8, 3)
    graph = analyse(model, (torch.randn(2, 8),), units="groups")
    one = Gated(model, graph)
    x = torch.randn(2, 8)
    assert torch.equal(one.train()(x), model(x))
    assert torch.equal(one.eval()(x), model(x))
    assert one.keep().kept() == {}
    assert "nothing can shrink" in repr(one)


def test_a_model_with_nothing_to_shrink_passes_through_per_example() -> None:
    model, x = nn.Linear(8, 3), torch.randn(2, 8)
    one = Gated(model, analyse(model, (x,), units="groups"), per_example=True).train()
    assert torch.equal(one(x), model(x))


def test_a_branch_that_is_read_nowhere_keeps_one_unit() -> None:
    one = gated("branches").double().eval()
    with torch.no_grad():
        one.log_alpha.fill_(4.0)
        one.log_alpha[one.cost.offsets["fc.inputs"] + 8 :][:12] = -4.0
    keep = one.keep()
    assert keep == keep.closed()
    assert keep.kept()["b"] == [0]
    x = images().double()
    assert max_rel_diff([one(x)], [shrunk(one).eval()(x)]) < 1e-12
    assert one.deployed() == one.cost.of(keep)
