"""What a user does with a transformers model: gate, train, shrink and save it; load it in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

COMMON = """
import sys, torch, prunus
from transformers import ViTConfig, ViTForImageClassification

def make():
    torch.manual_seed(3)
    config = ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
                       patch_size=4, num_labels=5)
    return ViTForImageClassification(config)

x = torch.linspace(-1, 1, 3 * 3 * 16 * 16).view(3, 3, 16, 16)
"""

FIRST = """
gated = prunus.gate(make(), {"pixel_values": x[:2]}, units="structured,branches", form=sys.argv[2])
budget = prunus.Budget(gated, params=0.6)
optimizer = torch.optim.Adam(gated.parameters(), lr=0.01)
for _ in range(5):
    loss = gated(pixel_values=x).logits.square().mean() + budget.pressure()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); budget.step()
small, receipt = prunus.shrink(gated, {"pixel_values": x[:2]}, seconds=0)
prunus.save(small, sys.argv[1])
small.eval()
assert all(b["met"] for b in receipt["budgets"])
print(receipt["form"], sum(p.numel() for p in small.parameters()), small(pixel_values=x).logits.double().sum().item())
"""

SECOND = """
small = prunus.load(make(), sys.argv[1]).eval()
print(sum(p.numel() for p in small.parameters()), small(pixel_values=x).logits.double().sum().item())
"""


@pytest.mark.parametrize(
    "form", ["auto", pytest.param("eager", marks=pytest.mark.slow), pytest.param("graph", marks=pytest.mark.slow)]
)
def test_a_vit_is_shrunk_and_comes_back_in_a_fresh_process(form: str, tmp_path: Path) -> None:
    path = str(tmp_path / "small.safetensors")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(code: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", COMMON + code, path, form], capture_output=True, text=True,
            check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    shrunk, size, total = run(FIRST)
    assert shrunk in ("eager", "graph")
    assert form in ("auto", shrunk)
    assert run(SECOND) == [size, total]
