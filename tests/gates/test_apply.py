"""Gates laid out and multiplied in, against autograd on plain products, and against plain loops."""

import itertools

import pytest
import torch
from torch import Tensor

from prunus.gates import DrawAndMultiply, HardConcrete, Multiply, Sites
from prunus.gates.apply import LARGE, _product_backward

SHAPES = {
    "linear": ((350, 400), 1),
    "small linear": ((3, 4), 1),
    "one output": ((1, 200_000), 1),
    "one input": ((200_000, 1), 1),
    "convolution": ((70, 80, 5, 5), 1),
    "1d": ((200, 300, 3), 1),
    "3d": ((40, 50, 3, 5, 5), 1),
    "transposed convolution": ((80, 70, 5, 5), 0),
}


def test_both_ways_are_tried() -> None:
    sizes = [torch.Size(shape).numel() > LARGE for shape, _ in SHAPES.values()]
    assert any(sizes)
    assert not all(sizes)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "transposed gradient", "channels last", "expanded gradient"])
def test_gradients_are_those_of_the_plain_product(name: str, dtype: torch.dtype, layout: str) -> None:
    shape, dim = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    view = [1] * len(shape)
    view[dim] = -1
    part = torch.rand(shape[dim], generator=generator, dtype=torch.float64).to(dtype).view(view)
    if layout == "transposed gradient":
        grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "expanded gradient":
        grad = grad.flatten()[0].expand(shape)
    elif layout == "channels last" and weight.dim() == 4:
        weight = weight.to(memory_format=torch.channels_last)
    for_weight, for_part = _product_backward(grad, part, weight)
    wanted_weight = grad.double() * part.double()
    wanted_part = (grad.double() * weight.double()).sum([d for d in range(len(shape)) if d != dim])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert for_weight.shape == weight.shape
    assert (for_weight.double() - wanted_weight).abs().max() <= tolerance * wanted_weight.abs().max()
    error = (for_part.double().flatten() - wanted_part).abs().max()
    assert error <= tolerance * (grad.double() * weight.double()).abs().sum(0).max()


@pytest.mark.parametrize("outputs", [3, 1500])
def test_large_complex_weights_too(outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(outputs, 80, dtype=torch.cdouble, generator=generator) for _ in range(2))
    part = torch.rand(1, 80, generator=generator).to(torch.cdouble)
    for_weight, for_part = _product_backward(grad, part, weight)
    assert torch.equal(for_weight, grad * part)
    assert torch.allclose(for_part, (grad * weight.conj()).real.sum(0))


def nested() -> tuple[Sites, list[Tensor]]:
    """Two weights: one reads units 0-2, the other six positions under units 3 and 4, each gated by 5-10 too."""
    index = torch.tensor([[0, 1, 2, 3, 3, 3, 4, 4, 4], [11, 11, 11, 5, 6, 7, 8, 9, 10]])
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(2, 3, 2, generator=generator), torch.randn(4, 6, generator=generator)]
    return Sites(index, [3, 6], [(1, -1, 1), (1, -1)]), [w.double() for w in weights]


def slowly(z: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The same products by plain loops."""
    first, second = torch.zeros_like(weights[0]), torch.zeros_like(weights[1])
    for o, i, k in itertools.product(range(2), range(3), range(2)):
        first[o, i, k] = weights[0][o, i, k] * z[i]
    for o, i in itertools.product(range(4), range(6)):
        second[o, i] = weights[1][o, i] * z[3 + i // 3] * z[5 + i]
    return [first, second]


@pytest.mark.parametrize("drawn", [True, False])
def test_nested_gates_are_multiplied_in_and_their_gradients_gathered(drawn: bool) -> None:
    sites, values = nested()
    gates, generator = HardConcrete(), torch.Generator().manual_seed(2)
    start = torch.randn(11, generator=generator, dtype=torch.float64)
    noise = torch.rand(11, generator=generator, dtype=torch.float64)
    grads = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in values]
    found, wanted = [], []
    for result, slow in ((found, False), (wanted, True)):
        location = start.clone().requires_grad_()
        weights = [w.clone().requires_grad_() for w in values]
        if slow:
            products = slowly(gates.sample(location, noise) if drawn else location, weights)
        elif drawn:
            products = list(DrawAndMultiply.apply(location, noise.clone(), gates, sites, *weights))
        else:
            products = list(Multiply.apply(location, sites, *weights))
        result += [*products, *torch.autograd.grad(products, [location, *weights], grads)]
    z = gates.sample(start, noise)
    assert {0.0, 1.0} & set(z.tolist())  # the ends are met, where log alpha has no gradient
    for one, two in zip(found, wanted, strict=True):
        assert torch.allclose(one, two, rtol=1e-12, atol=1e-14)
