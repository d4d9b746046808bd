"""What models do with their weights while gates act on them, and what is done to gated models."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import prunus
from prunus.errors import ModelError
from prunus.gated import Gated
from prunus.graph import analyse
from prunus.terms import spread


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.Sigmoid(), nn.Linear(8, 5), nn.Linear(5, 3))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Sigmoid(), nn.Conv2d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 2)
    )


def test_a_module_under_two_names_keeps_its_parameters() -> None:
    torch.manual_seed(0)
    block = nn.Linear(16, 16)
    model = nn.Sequential(nn.Linear(10, 16), block, nn.ReLU(), block, nn.ReLU(), nn.Linear(16, 2))
    x = torch.randn(2, 10)
    one = Gated(model, analyse(model, (x,))).eval()
    first = one(x)
    assert torch.equal(one(x), first)
    assert isinstance(block.weight, nn.Parameter)
    one.train()(x).sum().backward()
    assert isinstance(block.weight, nn.Parameter)
    assert block.weight.grad is not None


@pytest.mark.parametrize("units", ["structured", "weights"])
def test_shrinking_leaves_tied_and_twice_named_parameters_alone(units: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c, self.d, self.o = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)
            self.b = self.a
            self.d.weight = self.c.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.o(self.d(self.c(self.a(x).relu()).relu() + self.b(x)))

    model, x = Tied(), torch.randn(3, 12)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)}
    one = prunus.gate(model, x, units=units, rescale=False)
    with torch.no_grad():
        one.log_alpha.uniform_(-3, 3)
    small, receipt = prunus.shrink(one, x, batches=())
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(id(after[name]) == i and torch.equal(after[name], value) for name, (i, value) in before.items())
    assert receipt["exactness"]["ok"]
    assert torch.allclose(one.eval()(x), small.eval()(x), atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_refused(reentrant: bool) -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda h: self.b(self.a(h).relu()), x, use_reentrant=reentrant)

    model, x = Recomputing(), torch.randn(3, 4)
    one = Gated(model, analyse(model, (x,)))
    with pytest.raises(ModelError, match="recomputes activations in its backward pass"):
        one.train()(x)
    with torch.no_grad():
        assert one.eval()(x).shape == (3, 2)
    assert model(x.requires_grad_()).requires_grad  # outside, all is as it was


def test_gates_of_complex_weights_have_the_gradient_of_finite_differences() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, dtype=torch.cdouble), nn.Linear(6, 2, dtype=torch.cdouble))
    x = torch.randn(3, 4, dtype=torch.cdouble)
    one = Gated(model, analyse(model, (x,)))
    one.log_alpha.data = one.log_alpha.data.double()

    def loss(location: Tensor) -> Tensor:
        with torch.no_grad():
            one.log_alpha.copy_(location)
        torch.manual_seed(1)
        return one.train()(x).abs().square().sum()

    start = 0.3 * torch.randn(one.units, dtype=torch.float64)
    loss(start).backward()
    assert one.log_alpha.grad is not None
    for k in range(one.units):
        step = torch.zeros_like(start)
        step[k] = 1e-6
        slope = (loss(start + step) - loss(start - step)).item() / 2e-6
        assert one.log_alpha.grad[k].item() == pytest.approx(slope, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_second_derivatives_are_those_of_plain_operations(name: str) -> None:
    """The gradient of a squared gradient, in the gates and in the weights, against gates multiplied in by hand."""
    torch.manual_seed(5)
    model, x = (lenet(), torch.randn(3, 1, 12, 12)) if name == "lenet" else (mlp(), torch.randn(3, 10))
    one = Gated(model, analyse(model, (x,))).double().train()
    x = x.double()
    with torch.no_grad():
        one.log_alpha.normal_(std=2)

    def penalty(output: Tensor) -> Tensor:
        found = torch.autograd.grad(output.square().sum(), list(one.model.parameters()), create_graph=True)
        return sum((g.square().sum() for g in found), torch.zeros(()))

    torch.manual_seed(7)
    quick = torch.autograd.grad(penalty(one(x)), list(one.parameters()), allow_unused=True)
    torch.manual_seed(7)
    noise = torch.rand(one.units, dtype=torch.float64)
    z = one.gates.sample(one.log_alpha, noise)
    by_group = dict(zip(one.graph.sizes, z.split(list(one.graph.sizes.values())), strict=True))
    weights = {}
    for axis in one.graph.sites():
        weight = one.model.get_parameter(axis.tensor)
        shape = [1] * weight.dim()
        shape[axis.dim] = -1
        weights[axis.tensor] = weight * spread(axis.term, by_group).view(shape)
    assert len(weights) == len(one.graph.sites()) == 3 if name == "mlp" else 4
    slow = torch.autograd.grad(
        penalty(torch.func.functional_call(one.model, weights, (x,))), list(one.parameters()), allow_unused=True
    )
    assert quick[0] is not None
    for a, b in zip(quick, slow, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("convert", ["double", "half", "bfloat16"])
def test_a_converted_model_is_counted_as_it_is(convert: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 2))
    x = torch.randn(4, 8)
    one = prunus.gate(model, x)
    budget = prunus.Budget(one, bytes=0.5, params=0.6)
    one = getattr(one, convert)()
    assert one.log_alpha.dtype == (torch.float64 if convert == "double" else torch.float32)
    size = model[0].weight.element_size()
    assert one.cost.dense()["bytes"] == size * (90 + 22)
    assert budget.dense == [112, size * 112]
    with torch.no_grad():
        one.log_alpha.uniform_(-3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small, receipt = prunus.shrink(one, getattr(x, convert)(), batches=())
    assert receipt["deployed"]["bytes"] == sum(p.numel() * size for p in small.parameters()) <= 0.5 * size * 112
