"""What only a CUDA device can show. Run with `-m gpu`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import prunus
from prunus.budget import parse
from prunus.data import Dataset
from prunus.models import LeNet5
from prunus.train import Run, Settings, fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def toy_data() -> Dataset:
    """Ten noisy patterns: enough for a small network to learn in seconds."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 28, 28, generator=generator)
    labels = torch.arange(2000) % 10
    x = patterns[labels] + torch.randn(2000, 1, 28, 28, generator=generator)
    return Dataset("toy", x[:1600], labels[:1600], x[1600:], labels[1600:], 10)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_run_on_the_device_meets_its_budget(tmp_path, precision):
    data = toy_data()
    torch.manual_seed(0)
    settings = Settings(epochs=12, batch_size=64, precision=precision)
    run = Run(LeNet5(), data.train_x[:2], data, parse(["params=20%", "macs=60%"]), settings, tmp_path, device="cuda")
    result = fit(run)
    assert all(line["met"] for line in result.receipt["budgets"])
    assert result.receipt["exactness"]["ok"]
    assert result.receipt["metric"]["shrunk"] > 0.9
    small = prunus.load(LeNet5(), tmp_path / "small.safetensors")
    assert sum(p.numel() for p in small.parameters()) == result.receipt["deployed"]["params"]


def test_the_whole_step_can_be_captured_in_a_graph():
    """Sampling, forward, backward, optimizer and dual update replay as one CUDA graph, and the multiplier moves."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 1, 28, 28, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    model: nn.Module = LeNet5().cuda()
    gated = prunus.gate(model, x[:2])
    budget = prunus.Budget(gated, params=0.1, macs=0.3)
    optimizer = torch.optim.Adam(gated.parameters(), lr=1e-3, capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(gated(x), y) + budget.pressure()
        loss.backward()
        optimizer.step()
        budget.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = budget.multiplier.weight.clone()
    gates = gated.log_alpha.detach().clone()
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert bool((budget.multiplier.weight > before).all())
    assert not torch.equal(gates, gated.log_alpha)
    assert bool(torch.isfinite(gated.log_alpha).all())
