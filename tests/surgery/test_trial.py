"""What models may do while they are tried: draw, count, mask, cast, take numbers of some range only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_zoo import Net
from torch import Tensor, nn
from torch.nn import functional as F

import prunus
from prunus.errors import ModelError
from prunus.surgery import Inputs


def shrunk(net: nn.Module, x: Any, **options: Any) -> tuple[nn.Module, prunus.Receipt]:
    """Gate a model, close about half of what can shrink, and shrink it."""
    gated = prunus.gate(net, x, **options)
    with torch.no_grad():
        gated.log_alpha.copy_(2 * torch.randn(gated.units, generator=torch.Generator().manual_seed(3)))
    return prunus.shrink(gated, x, batches=())


def smaller(net: nn.Module, x: Any, **options: Any) -> prunus.Receipt:
    _, receipt = shrunk(net, x, **options)
    assert receipt["deployed"]["params"] < receipt["dense"]["params"]
    assert receipt["exactness"]["ok"]
    return receipt


def layers(**more: nn.Module) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"a": nn.Linear(10, 16), "b": nn.Linear(16, 3), **more}


TAKES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "logarithms": (lambda: Net(lambda m, x: m.b(m.a(torch.log(x)).relu()), **layers()), torch.rand(6, 10) + 0.5),
    "roots": (lambda: Net(lambda m, x: m.b(m.a(x.sqrt()).relu()), **layers()), torch.rand(6, 10)),
    "an index in a column": (
        lambda: Net(lambda m, x: m.b(m.a(x).relu()) + m.e(x[:, 0].long()), **layers(e=nn.Embedding(5, 3))),
        torch.cat([torch.randint(0, 5, (6, 1)).float(), torch.randn(6, 9)], 1),
    ),
    "masked logits": (
        lambda: Net(
            lambda m, x: m.b(m.a(x).relu()).masked_fill(torch.tensor([False, True, False]), -torch.inf), **layers()
        ),
        torch.randn(6, 10),
    ),
    "noise of its own": (
        lambda: Net(lambda m, x: m.b(m.a(x + 0.1 * torch.randn_like(x)).relu()), **layers()), torch.randn(6, 10)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKES)
def test_models_that_take_some_numbers_only(name: str) -> None:
    make, x = TAKES[name]
    receipt = smaller(make(), x)
    assert receipt["exactness"]["inputs"] == 4  # random ones too: between the user's own where need be


def test_buffers_with_a_domain_are_varied_within_it() -> None:
    class Scheduled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(10, 16), nn.Linear(16, 3)
            self.register_buffer("alphas", torch.linspace(0.99, 0.01, 16))
            self.sigma = nn.Parameter(torch.full((16,), 0.3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).relu() * (1 - self.alphas).sqrt().mean() + self.sigma.log().mean()
            return self.b(x)

    smaller(Scheduled(), torch.randn(4, 10))


def test_measuring_a_model_does_not_train_it() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(10, 16), nn.Linear(16, 3)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(10))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return self.b(self.a(x - self.mean).relu())

    net = Counting()
    receipt = smaller(net, torch.randn(4, 10))
    assert net.seen.item() == 0
    assert not net.mean.any()
    assert receipt["exactness"]["max_rel_diff"] <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_in_the_code_are_no_obstacle(dtype: torch.dtype) -> None:
    net = Net(lambda m, x: m.b(F.softmax(m.a(x).float(), -1).to(dtype)).half(), **layers()).to(dtype)
    receipt = smaller(net, torch.randn(4, 10).to(dtype))
    assert receipt["exactness"]["tolerance"] == 1e-5


def test_a_group_that_cannot_live_with_one_unit_is_frozen_and_says_so() -> None:
    net = Net(
        lambda m, x: m.h(F.adaptive_avg_pool2d(m.c(x).relu(), 1).squeeze()), c=nn.Conv2d(3, 8, 3), h=nn.Linear(8, 4)
    )
    graph = prunus.gate(net, torch.randn(4, 3, 8, 8)).graph
    reasons = {frozen.axis: frozen.operation for frozen in graph.frozen}
    assert "c" not in graph.sizes
    assert reasons["c.weight[0]"].startswith("with one unit left, removal does not run")
    net = Net(lambda m, x: m.h(F.adaptive_avg_pool2d(m.c(x), 1).flatten(1)), c=nn.Conv2d(3, 8, 3), h=nn.Linear(8, 4))
    assert prunus.gate(net, torch.randn(4, 3, 8, 8)).graph.sizes == {"c": 8}


def test_a_zero_scalar_hides_no_error() -> None:
    """ReZero: the branch behind it counts once it has been trained."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.o(x + m.al * m.b(h.relu() * h.shape[-1] ** -0.5))

    net = Net(forward, a=nn.Linear(10, 16), b=nn.Linear(16, 10), o=nn.Linear(10, 2))
    net.al = nn.Parameter(torch.zeros(1))
    graph = prunus.gate(net, torch.randn(4, 10), units="groups", form="eager").graph
    assert "a" not in graph.sizes
    assert any("not exact" in frozen.operation for frozen in graph.frozen)
    x = torch.randn(4, 10)
    gated = prunus.gate(
        net, x, units="groups", rescale=False
    )  # as operations, the factor is a number, which stays what it was
    assert (gated.graph.form, gated.graph.sizes) == ("graph", {"a": 16})
    with torch.no_grad():
        net.al.fill_(0.7)
        gated.log_alpha.copy_(3 * torch.randn(16, generator=torch.Generator().manual_seed(3)))
    small, receipt = prunus.shrink(gated, x, batches=())
    assert receipt["form"] == "graph"
    assert small.get_parameter("a.weight").shape[0] == len(receipt["groups"]["a"]["kept"]) < 16


def test_a_function_that_holds_on_to_the_model_is_refused() -> None:
    class Closure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.o = nn.Linear(10, 16), nn.Linear(16, 12), nn.Linear(12, 2)
            self.f = lambda h: self.b(h).relu()

        def forward(self, x: Tensor) -> Tensor:
            return self.o(self.f(self.a(x).relu()))

    with pytest.raises(ModelError, match=r"A copy of the model Closure still reads the original's 'b\.weight'"):
        prunus.gate(Closure(), torch.randn(4, 10))


def test_no_numbers_at_all() -> None:
    with pytest.raises(ModelError, match="gives NaN, or no numbers at all"):
        prunus.gate(Net(lambda m, x: m.b(m.a(x)) / 0 * 0, **layers()), torch.randn(4, 10))


@pytest.mark.parametrize(
    "x, sentence",
    [
        (torch.randn(4, 9), "The model Net cannot take these example inputs"),
        (torch.randn(4, 10).double(), "The model Net cannot take these example inputs"),
        (torch.randn(0, 10), r"An example input is empty, of shape \(0, 10\)"),
    ],
)
def test_inputs_that_a_model_cannot_take(x: Tensor, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        prunus.gate(Net(lambda m, x: m.b(m.a(x)), **layers()), x)


def test_other_values_lie_between_those_that_are_there() -> None:
    x = torch.stack([torch.arange(8.0), 100 + torch.rand(8)], 1)
    some = Inputs.of(x).like(1).args[0]
    assert some.shape == x.shape
    assert not torch.equal(some, x)
    for column in range(2):
        assert x[:, column].min() <= some[:, column].min() <= some[:, column].max() <= x[:, column].max()
    one = torch.tensor([[1.0, 5.0, 2.0]])
    assert 1 <= Inputs.of(one).like(2).args[0].min() <= Inputs.of(one).like(2).args[0].max() <= 5


def test_macs_of_operations_without_a_rule_are_counted_and_stay() -> None:
    """A product with a parameter of the model's own, which no gate reaches: 256 MACs that nothing takes away."""
    net = Net(lambda m, x: m.o(torch.tensordot(m.a(x).relu(), m.w, 1).relu()), a=nn.Linear(10, 16), o=nn.Linear(16, 2))
    net.w = nn.Parameter(torch.randn(16, 16))
    x = torch.randn(4, 10)
    gated = prunus.gate(net, x)
    assert gated.cost.dense()["macs"] == 160 + 256 + 32
    assert gated.graph.fixed_macs >= 256
    assert "a" not in gated.graph.sizes
    weights = prunus.gate(net, x, units="weights", rescale=False)
    budget = prunus.Budget(weights, macs=300)
    with pytest.warns(UserWarning, match="The landing had to close"):
        small, receipt = prunus.shrink(weights, x, batches=())
    kept = sum(int((small.get_parameter(name) != 0).sum()) for name in weights.graph.scattered)
    assert receipt["deployed"]["macs"] == kept + 256 <= 300
    assert budget.met()


@pytest.mark.parametrize("batch", [1, 3, 6])
def test_macs_that_the_batch_does_not_divide(batch: int) -> None:
    net = Net(lambda m, x: m.o(m.a(x).relu() * m.h(m.z)), a=nn.Linear(10, 16), h=nn.Linear(5, 16), o=nn.Linear(16, 2))
    net.z = nn.Parameter(torch.randn(1, 5))
    receipt = smaller(net, torch.randn(batch, 10))
    assert receipt["dense"]["macs"] == round((batch * (160 + 32) + 80) / batch - 1e-6)


def test_latency_of_inputs_that_only_fit_each_other_is_left_out() -> None:
    net = Net(lambda m, x, edges: m.b(m.a(x).relu()[edges[0]]), **layers())
    x = (torch.randn(7, 10), torch.randint(0, 7, (2, 20)))
    gated = prunus.gate(net, x)
    _, receipt = prunus.shrink(gated, x, seconds=0.001)
    assert "1" not in receipt["deployed"]["latency_ms"]
    assert receipt["exactness"]["ok"]
