"""What is measured, against counts by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunus.measure import (
    batch_size,
    count_bytes,
    count_macs,
    count_params,
    counting,
    evaluating,
    latencies,
    with_batch,
)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6, bias=False)
        self.b = nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("kept", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("passing", torch.zeros(100), persistent=False)

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        return self.b(self.a(x)) if twice else self.a(x)


def test_shared_tensors_count_once_and_passing_buffers_not_at_all() -> None:
    assert count_params(Both()) == 36
    assert count_bytes(Both()) == 36 * 4 + 5 * 8
    assert count_bytes(Both().to(torch.bfloat16)) == 36 * 2 + 5 * 2


def test_a_module_under_two_names_counts_once() -> None:
    layer = nn.Linear(3, 2)
    model = nn.Sequential(layer, nn.Identity(), layer)
    assert count_params(model) == 8
    assert count_bytes(model) == 32


def test_batch_norms_are_stored_with_their_statistics() -> None:
    assert count_bytes(nn.BatchNorm2d(7)) == 4 * 7 * 4 + 8


@pytest.mark.parametrize("batch", [1, 4])
def test_macs_of_one_example_by_hand(batch: int) -> None:
    conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1)
    assert count_macs(conv, (torch.randn(batch, 3, 8, 8),)) == 8 * 3 * 9 * 16
    assert count_macs(nn.Conv2d(6, 8, 3, groups=2), (torch.randn(batch, 6, 5, 5),)) == 8 * 3 * 9 * 9
    assert count_macs(nn.ConvTranspose2d(3, 5, 2, stride=2), (torch.randn(batch, 3, 4, 4),)) == 3 * 5 * 4 * 16
    assert count_macs(nn.Linear(7, 3), (torch.randn(batch, 5, 7),)) == 7 * 3 * 5
    assert count_macs(Both(), (torch.randn(batch, 6),), {"twice": True}) == 72


def test_macs_of_attention_count_its_products_too() -> None:
    mha = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8)
    fast = torch.backends.mha.get_fastpath_enabled()
    assert count_macs(mha, (x, x, x)) == 4 * 8 * 8 * 5 + 2 * 5 * 5 * 8
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_counting_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    model[2].eval()
    count_macs(model, (torch.randn(4, 3),))
    assert [m.training for m in model] == [True, True, False]
    assert model[1].num_batches_tracked == 0


def test_modes_come_back_even_after_an_error() -> None:
    model, other = nn.Sequential(nn.Dropout(), nn.Dropout().eval()), nn.Dropout()

    def fail() -> None:
        with evaluating(model, other):
            assert not any(module.training for module in [*model.modules(), other])
            assert not torch.is_grad_enabled()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert [model.training, model[0].training, model[1].training, other.training] == [True, True, False, True]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "args, kwargs, size",
    [
        ((torch.zeros(4, 2),), None, 4),
        ((3, torch.tensor(1.0), {"x": torch.zeros(5)}), None, 5),
        ((), {"x": [torch.zeros(6, 1)]}, 6),
        ((torch.tensor(2.0),), {}, 1),
        ((), {}, 1),
    ],
)
def test_the_batch_is_the_first_dimension_of_the_first_tensor(args: Any, kwargs: Any, size: int) -> None:
    assert batch_size(args, kwargs) == size


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_inputs_of_another_batch(batch: int) -> None:
    x, weight = torch.arange(6.0).view(3, 2), torch.ones(2, 2)
    (y, info, scalar), _ = with_batch((x, {"w": weight, "n": 5}, torch.tensor(1.0)), batch)
    assert y.tolist() == [x[k % 3].tolist() for k in range(batch)]
    assert info["w"] is weight
    assert (info["n"], scalar.dim()) == (5, 0)


def test_latencies_are_positive_and_tell_slow_from_fast() -> None:
    x = torch.randn(400, 400)
    found = latencies({"fast": lambda: None, "slow": lambda: F.relu(x @ x)}, seconds=0.02)
    assert set(found) == {"fast", "slow"}
    assert found["slow"]["median"] > found["fast"]["median"] >= 0
    assert all(set(v) == {"median", "spread"} and v["spread"] >= 0 for v in found.values())


@pytest.mark.parametrize(
    ("equation", "one", "two"),
    [
        ("bhld,bhmd->bhlm", (2, 3, 4, 5), (2, 3, 6, 5)), ("ij,jk", (3, 4), (4, 5)), ("bi,i->b", (3, 4), (4,)),
        ("bij,bjk->ikb", (2, 3, 4), (2, 4, 5)), ("ij,kj->", (2, 3), (4, 3)), ("bij,bjk->bi", (2, 3, 1), (2, 1, 5)),
    ],
)  # fmt: skip
def test_einsum_counts_as_the_product_of_its_sizes(equation: str, one: tuple[int, ...], two: tuple[int, ...]) -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.einsum(equation, a, b)

    a, b = torch.randn(one, dtype=torch.float64), torch.randn(two, dtype=torch.float64)
    with counting() as counter:
        counted = Product()(a, b)
    torch.testing.assert_close(counted, torch.einsum(equation, a, b))
    left = equation.partition("->")[0]
    sizes = dict(zip(left.replace(",", ""), (*one, *two), strict=True))
    assert counter.get_total_flops() == 2 * math.prod(sizes.values())
