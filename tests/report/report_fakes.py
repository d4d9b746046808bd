"""Fake runs that behave as real ones do: a constrained run of seed 004 on a LeNet, in numbers only."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LENET = {"conv1": (20, "map"), "conv2": (50, "map"), "fc1": (800, "input"), "fc2": (500, "neuron")}
MakeRun = Callable[..., Path]


def fake_lines(
    *,
    limit: float = 0.10,
    epochs: int = 60,
    polish: int = 6,
    per_epoch: int = 40,
    every: int = 4,
    seed: int = 1,
    groups: dict[str, tuple[int, str]] | None = None,
    layers: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
    nan_at: tuple[int, ...] = (),
    finished: bool = True,
    model: str = "lenet5",
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Lines of a log, and the receipt."""
    rng = np.random.default_rng(seed)
    groups = LENET if groups is None else groups
    dense = {"params": 431_080, "macs": 2_293_000, "bytes": 1_730_000}
    wheres: list[str | None] = list(layers) or [None]
    wholes = [dense["params"] // (1 if w is None else 3 + i) for i, w in enumerate(wheres)]
    targets = [limit * (1 + i) for i in range(len(wheres))]
    lines: list[dict[str, Any]] = [
        {
            "kind": "start", "schema": 1, "model": model, "data": "mnist", "seed": seed, "device": "cpu",
            "epochs": epochs, "steps_per_epoch": per_epoch, "method": "constrained-l0",
            "settings": {"lr": 7e-4, "dual": {"lr": 1e-3, "restarts": True}, "betas": [0.9, 0.999], "note": None},
            "versions": {"prunus": "0.1.0", "torch": "2.11.0", "python": "3.11.7"}, "dense": dense,
            "budgets": [
                {"what": "params", "where": w, "limit": t * n, "dense": n}
                for w, t, n in zip(wheres, targets, wholes, strict=True)
            ],
            "groups": [{"name": k, "size": n, "unit": u} for k, (n, u) in groups.items()],
        }
    ]  # fmt: skip
    lines += [{"kind": "warning", "message": message} for message in warnings]
    share = np.ones(len(wheres))
    multiplier = np.zeros(len(wheres))
    mean_loss = 0.0
    landed = epochs - polish
    kept: dict[str, int] = {}
    for step in range(1, epochs * per_epoch + 1):
        at = step / (landed * per_epoch)
        over = share - np.array(targets)
        multiplier = np.where(over > 0, multiplier + 0.012 * over, 0.0)  # a dual restart
        drift = 0.0004 * (over < 0) * rng.random(len(wheres))
        share = np.clip(share - 0.03 / len(lines) ** 0.1 * multiplier**1.3 * share**1.5 + drift, 0.6 * limit, 1)
        deployed = np.minimum(share * (1 + 0.30 * math.exp(-2.5 * at)), 1)
        if step > landed * per_epoch:
            deployed = np.minimum(deployed, np.array(targets) * 0.996)
            share = np.minimum(share, deployed)
        loss = 2.2 * math.exp(-at * 25) + 0.05 + 0.05 * (1 - share[0]) + abs(0.05 * rng.normal())
        mean_loss += loss / per_epoch
        budgets = [
            {"expected": float(s * n), "deployed": round(float(d * n)), "paper": float(0.3 + 0.7 * s),
             "multiplier": float(m)}
            for s, d, n, m in zip(share, deployed, wholes, multiplier, strict=True)
        ]  # fmt: skip
        power = {"params": 1.0, "macs": 0.62, "bytes": 1.0}
        expected = {k: v * float(share[0]) ** power[k] for k, v in dense.items()}
        if step % every == 0:
            told = None if step // every in nan_at else loss
            lines.append({"kind": "step", "step": step, "epoch": step / per_epoch, "loss": told,
                          "expected": expected, "budgets": budgets})  # fmt: skip
        if step % per_epoch == 0:
            epoch = step // per_epoch
            kept = {k: max(1, round(n * float(deployed[0]) ** (0.25 + 0.4 * (i % 3) / 2)))
                    for i, (k, (n, _)) in enumerate(groups.items())}  # fmt: skip
            p = np.clip(rng.beta(0.25 + 3 * max(1 - at, 0), 0.9, 1370), 0, 1) if epoch > 1 else np.full(1370, 0.92)
            p = np.where(rng.random(1370) < min(at, 1) * 0.7, p * 0.03, p)
            lines.append(
                {
                    "kind": "epoch", "epoch": epoch, "step": step, "phase": "train" if epoch <= landed else "polish",
                    "loss": mean_loss, "seconds": 3.2, "expected": expected, "budgets": budgets, "kept": kept,
                    "metric": {"name": "accuracy", "value": 0.991 - 0.5 * math.exp(-at * 20) - 0.01 * float(over[0])},
                    "deployed": {k: round(v * float(deployed[0]) ** power[k]) for k, v in dense.items()},
                    "open": np.histogram(p, 20, (0, 1))[0].tolist(),
                }
            )  # fmt: skip
            mean_loss = 0.0
            if epoch == landed:
                lines.append(
                    {"kind": "landing", "epoch": epoch, "closed": 3, "cost": [
                        {"what": "params", "where": w, "before": round(t * n * 1.021), "after": round(t * n * 0.996)}
                        for w, t, n in zip(wheres, targets, wholes, strict=True)]}
                )  # fmt: skip
    last = next(line for line in reversed(lines) if line["kind"] in ("epoch", "start"))
    receipt = {
        "schema": 1,
        "dense": {**dense,
                  "latency_ms": {"1": {"median": 1.42, "spread": 0.06}, "64": {"median": 31.4, "spread": 1.2}}},
        "deployed": {**last.get("deployed", dense),
                     "latency_ms": {"1": {"median": 0.61, "spread": 0.03}, "64": {"median": 9.8, "spread": 0.4}}},
        "budgets": [
            {"what": "params", "where": w, "limit": t * n, **{k: row[k] for k in ("expected", "deployed", "paper")},
             "met": row["deployed"] <= t * n}
            for w, t, n, row in zip(wheres, targets, wholes, last["budgets"], strict=True) if "deployed" in row
        ],
        "groups": {k: {"size": n, "kept": list(range(kept.get(k, n)))} for k, (n, _) in groups.items()},
        "exactness": {"max_rel_diff": 3.1e-7, "inputs": 256, "tolerance": 1e-5, "ok": True},
        "metric": {"name": "accuracy", "dense": 0.9921, "gated": 0.9784, "shrunk": 0.9784},
        "run": {"seed": seed, "seconds": 192.4, "device": "cpu", "versions": {"prunus": "0.1.0", "torch": "2.11.0"},
                "epochs": epochs, "method": "constrained-l0", "landing": {"closed": 3}},
    }  # fmt: skip
    if finished:
        lines.append({"kind": "end", "seconds": 192.4, "receipt": receipt})
    return lines, receipt


def put(folder: Path, lines: list[dict[str, Any]], receipt: Any = None) -> Path:
    """Write a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if receipt is not None:
        (folder / "receipt.json").write_text(json.dumps(receipt))
    return folder
