"""How fast real networks are once they are shrunk: random gates, landed at half of the MACs, removed, measured.

The units that stay are random, so this says nothing of accuracy; it says what surgery makes of a budget: parameters,
MACs, form, exactness, milliseconds, with and without round widths.

    python tools/real_models.py --device cuda --out results/real_models.json
"""

import argparse
import json
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import prunus

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "zoo"))
import zoo_large

MODELS = {"resnet50": zoo_large.resnet50_real, "vit_b16": zoo_large.vit_b16_real}


def measured(name: str, device: str, round_to: int, batches: tuple[int, ...]) -> dict[str, Any]:
    """Gate, land at half of the MACs, shrink; what came out."""
    torch.manual_seed(0)
    model, example = MODELS[name]()
    model = model.to(device).eval()
    example = tuple(x.to(device) for x in example)
    start = time.perf_counter()
    gated = prunus.gate(model, example, round_to=round_to, rescale=False)
    gate_seconds = time.perf_counter() - start
    with torch.no_grad():
        gated.log_alpha.copy_(torch.randn(gated.units, device=device) + 1)
    prunus.Budget(gated, macs=0.5)
    start = time.perf_counter()
    _, receipt = prunus.shrink(gated, example, batches=batches, seconds=1.0)
    result = {
        "model": name,
        "round_to": round_to,
        "form": receipt["form"],
        "gate_seconds": round(gate_seconds, 2),
        "shrink_seconds": round(time.perf_counter() - start, 2),
        "exactness": receipt["exactness"],
        "dense": receipt["dense"],
        "deployed": receipt["deployed"],
        "budgets": receipt["budgets"],
    }
    ratios = {}
    for batch, dense in receipt["dense"]["latency_ms"].items():
        ratios[batch] = round(dense["median"] / receipt["deployed"]["latency_ms"][batch]["median"], 3)
    kept = {what: f"{receipt['deployed'][what] / receipt['dense'][what]:.1%}" for what in ("params", "macs")}
    print(name, f"round_to={round_to}", receipt["form"], kept, "times faster", ratios, f"gate {gate_seconds:.1f} s")
    return result | {"times_faster": ratios}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    batches = tuple(int(batch) for batch in options.batches.split(","))
    found = [measured(name, options.device, step, batches) for name in MODELS for step in (1, 8)]
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.processor() or "cpu"
    facts = {
        "command": " ".join(["python", *sys.argv]),
        "commit": options.commit or git.stdout.strip(),
        "device": device,
        "torch": torch.__version__,
        "seed": 0,
        "results": found,
    }
    options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
