"""Asking for less never gives more: over ten budgets, what is deployed falls with the limit and never lies above it."""

import copy

import pytest
import torch
from torch.nn import functional as F
from zoo_models import ZOO

import prunus

SHARES = (0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.95)


def trained(name: str, units: str) -> tuple[prunus.Gated, object]:
    """A gated model after a few steps on noise, so that its gates differ."""
    entry = ZOO[name]
    torch.manual_seed(0)
    inputs = entry.inputs()
    gated = prunus.gate(entry.make(), inputs, units=units, keep=0.8)
    with torch.no_grad():
        gated.log_alpha += torch.randn(gated.units)
    optimizer = torch.optim.Adam(gated.parameters(), lr=0.01)
    budget = prunus.Budget(gated, params=0.5)
    for _ in range(5):
        loss = F.cross_entropy(gated(*inputs), torch.tensor([0, 1])) + budget.pressure()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        budget.step()
    return gated, inputs


@pytest.mark.parametrize("what", ["params", "macs"])
@pytest.mark.parametrize(
    ("name", "units"), [("resnet18", "structured"), ("resnet18", "structured,branches"), ("vit", "structured"),
                        ("vit", "structured,head_dims,branches")]
)  # fmt: skip
def test_deployed_cost_is_monotone_in_the_budget(name: str, units: str, what: str) -> None:
    gated, _ = trained(name, units)
    dense = gated.cost.dense()[what]
    low = gated.cost.whole(gated.open_units(torch.full((gated.units,), gated.gates.low)))
    least = dict(zip(("params", "macs", "bytes"), low.tolist(), strict=True))[what] / dense
    before, found = copy.deepcopy(gated.state_dict()), []
    for share in SHARES:
        gated.load_state_dict(before)
        limit = least + share * (1 - least)
        budget = prunus.Budget(gated, **{what: limit})
        prunus.land(gated)
        found.append(gated.deployed()[what])
        assert found[-1] <= limit * dense + 1e-6
        assert budget.met()
    assert found == sorted(found)
    assert found[0] < found[-1]
