"""Ten budgets, each trained for by `prunus train`: does asking for less ever give more?

python tools/sweep.py --epochs 20 --out results/sweep.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SWEEPS = {
    "resnet18": ("structured", (2, 5, 10, 15, 20, 30, 40, 55, 70, 90)),
    "vit": ("structured,head_dims,branches", (20, 25, 30, 35, 40, 50, 60, 70, 80, 95)),
}


def trained(model: str, units: str, percent: int, epochs: int, folder: Path) -> dict[str, Any]:
    """One run of the command; what its receipt says."""
    out = folder / f"{model}-{percent}"
    start = time.perf_counter()
    done = subprocess.run(
        ["prunus", "train", "--quiet", "--model", f"digits_models:{model}", "--data", "digits", "--units", units,
         "--budget", f"params={percent}%", "--epochs", str(epochs), "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(HERE), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    receipt = json.loads((out / "receipt.json").read_text())
    found = {
        "model": model,
        "limit": f"{percent}%",
        "params": receipt["deployed"]["params"],
        "share": round(receipt["deployed"]["params"] / receipt["dense"]["params"], 4),
        "met": all(budget["met"] for budget in receipt["budgets"]),
        "accuracy": receipt["metric"]["shrunk"],
        "form": receipt["form"],
        "closed_at_landing": receipt["run"]["landing"]["closed"],
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--models", default="resnet18,vit")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            trained(model, units, percent, options.epochs, Path(folder))
            for model, (units, percents) in SWEEPS.items()
            if model in options.models.split(",")
            for percent in percents
        ]
    monotone = {}
    for model in SWEEPS:
        sizes = [run["params"] for run in runs if run["model"] == model]
        if sizes:
            monotone[model] = sizes == sorted(sizes)
    facts = {
        "command": " ".join(["python", *sys.argv]),
        "commit": git.stdout.strip(),
        "device": "2 CPU cores",
        "seed": 0,
    }
    options.out.write_text(json.dumps({**facts, "monotone": monotone, "runs": runs}, indent=1) + "\n")
    print("monotone:", monotone)


if __name__ == "__main__":
    main()
