"""What somebody found who knew the README alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prunus
from prunus.errors import ModelError, PrunusWarning
from prunus.graph import analyse
from prunus.measure import total_macs


class Queries(nn.Module):
    """A view of a parameter goes into a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(1, 4, 8))
        self.a, self.o = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.a(self.q.expand(x.shape[0], -1, -1), x, x)[0])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.n2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.d, self.h = nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(self.a(x)).relu()
        x = x + self.n2(self.b(x))
        return self.h(self.d(x.mean((2, 3))))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 16), nn.Linear(16, 2)

    def forward(self, *xs: Tensor) -> Tensor:
        return sum((k + 1) * self.b(self.a(x).relu()) for k, x in enumerate(xs))


def half_closed(gated: prunus.Gated) -> None:
    with torch.no_grad():
        gated.log_alpha.fill_(2.0)
        gated.log_alpha[::2] = -9.0


def test_a_view_of_a_parameter_is_counted() -> None:
    gated = prunus.gate(Queries(), torch.randn(2, 5, 8))
    assert gated.graph.sizes == {"a": 2, "a.out_proj": 8}
    half_closed(gated)
    assert prunus.shrink(gated, torch.randn(2, 5, 8), seconds=0)[1]["exactness"]["ok"]


def test_a_closed_branch_leaves_the_training_mode_as_it_was() -> None:
    x = torch.randn(4, 3, 8, 8)
    gated = prunus.gate(Residual(), x, units="branches")
    gated.log_alpha.data.fill_(-9)
    small, receipt = prunus.shrink(gated, x, seconds=0)
    assert receipt["deployed"]["params"] < receipt["dense"]["params"] / 2
    small.train()
    assert not torch.equal(small(x), small(x))  # dropout
    assert small.get_buffer("n.num_batches_tracked") == 2
    assert "n2.num_batches_tracked" not in small.state_dict()


def test_weights_that_grew_again_are_not_lost_in_silence(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    gated = prunus.gate(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), x, units="weights")
    half_closed(gated)
    small, _ = prunus.shrink(gated, x, seconds=0)
    prunus.save(small, tmp_path / "before.safetensors")
    with torch.no_grad():
        for parameter in small.parameters():
            parameter += 0.1
    with pytest.raises(ModelError, match="not zero any more"):
        prunus.save(small, tmp_path / "after.safetensors")
    assert not (tmp_path / "after.safetensors").exists()


@pytest.mark.parametrize("units", ["structured", "weights", "4x4", "2:4"])
def test_half_of_the_bytes_is_half_of_the_dense_models(units: str) -> None:
    x = torch.randn(2, 20)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 8))
    gated = prunus.gate(model, x, units=units)
    prunus.Budget(gated, bytes=0.55)
    _, receipt = prunus.shrink(gated, x, seconds=0)
    assert receipt["dense"]["bytes"] == 4 * sum(p.numel() for p in model.parameters())
    assert receipt["deployed"]["bytes"] <= 0.55 * receipt["dense"]["bytes"]


@pytest.mark.parametrize("how", ["args", "same"])
def test_any_number_of_inputs_and_one_tensor_given_twice(how: str) -> None:
    x = torch.randn(4, 5)
    example = (x, x) if how == "same" else (x, torch.randn(4, 5))
    gated = prunus.gate(Twice(), example, form="graph")
    half_closed(gated)
    small, receipt = prunus.shrink(gated, example, seconds=0)
    assert receipt["deployed"]["latency_ms"]
    one, two = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(small(one, two), gated.eval()(one, two))


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(6, 16, bias=False), nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.o(self.b((adjacency @ self.a(x)).relu()).relu())


def test_features_of_a_graph_convolution_are_neurons() -> None:
    graph = analyse(GraphConvolution(), (torch.randn(2, 5, 6), torch.rand(2, 5, 5)), units="groups")
    assert [(group.name, group.size, group.unit) for group in graph.groups] == [("a", 16, "neuron"), ("b", 8, "neuron")]


class Axial(nn.Module):
    """Attention over the last but one axis, whatever stands before it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 4)).transpose(-2, -3) for part in self.qkv(x).chunk(3, -1))
        weights = torch.einsum("...id,...jd->...ij", q, k).softmax(-1)
        return self.out(torch.einsum("...ij,...jd->...id", weights, v).transpose(-2, -3).flatten(-2))


def test_an_ellipsis_stands_for_dimensions() -> None:
    x = torch.randn(2, 3, 5, 12)
    gated = prunus.gate(Axial(), x, units="heads")
    assert {(group.size, group.unit) for group in gated.graph.groups} == {(3, "head")}
    half_closed(gated)
    small, receipt = prunus.shrink(gated, x, seconds=0)
    assert receipt["deployed"]["macs"] == round(total_macs(small, (x,)) / 2)


@pytest.mark.parametrize("units", [["weights"], ["16x16"], ("2:4",)])
def test_one_kind_in_a_list_is_one_kind(units: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    assert prunus.gate(model, torch.randn(2, 64), units=units).units


def test_nothing_to_gate_is_said() -> None:
    with pytest.warns(PrunusWarning, match="Nothing in this model carries gates"):
        prunus.gate(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4), units="heads")


def test_receipts_hold_no_tensors() -> None:
    x = torch.randn(2, 5, 8)
    gated = prunus.gate(Queries(), x)
    json.dumps(prunus.shrink(gated, x, seconds=0)[1])
