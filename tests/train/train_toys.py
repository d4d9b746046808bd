"""A tiny network on tiny data, and runs of it that take a second."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunus.budget import parse
from prunus.data import Dataset
from prunus.record import Writer, read
from prunus.train import Progress, Run, Settings

FEATURES, CLASSES, BATCH = 6, 3, 32
STEPS = 5  # batches an epoch: four of 32 and one of 16


class Net(nn.Module):
    """A few hundred parameters, with what a checkpoint must not forget: running statistics and dropout's draws."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc1 = nn.Linear(FEATURES, 12)
            self.norm = nn.BatchNorm1d(12)
            self.drop = nn.Dropout(0.1)
            self.fc2 = nn.Linear(12, 8)
            self.fc3 = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.fc1(x)).relu())
        return self.fc3(self.fc2(x).relu())


def toy_data(seed: int = 0, train: int = 144, test: int = 50) -> Dataset:
    """Three noisy patterns: enough for a tiny network to learn in a second."""
    generator = torch.Generator().manual_seed(seed)
    patterns = 1.5 * torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.arange(train + test) % CLASSES
    x = patterns[labels] + torch.randn(train + test, FEATURES, generator=generator)
    return Dataset("toy", x[:train], labels[:train], x[train:], labels[train:], CLASSES)


def make(
    out: Path,
    budgets: tuple[str, ...] = ("params=50%",),
    *,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    inputs: Any = None,
    progress: Progress | None = None,
    kind: type[Run] = Run,
    **settings: Any,
) -> Run:
    """A run of the toy; what is not given is the toy's own."""
    data = data or toy_data()
    chosen = Settings(**{"epochs": 3, "batch_size": BATCH, "log_every": 2, **settings})
    return kind(
        Net() if model is None else model,
        data.train_x[:2] if inputs is None else inputs,
        data,
        parse(budgets),
        chosen,
        out,
        device="cpu",
        names=("net", "toy"),
        progress=progress,
    )


def trained(run: Run) -> list[dict[str, Any]]:
    """Train without surgery behind it; gives the log."""
    with Writer(run.out / "log.jsonl") as log:
        run.train(log)
    return read(run.out / "log.jsonl")


def tensors(run: Run) -> dict[str, Tensor]:
    """Weights, running statistics, gates and multipliers."""
    found = {name: value.detach().clone() for name, value in run.gated.model.state_dict().items()}
    return found | {"log_alpha": run.gated.log_alpha.detach().clone(), "lambda": run.budget.multiplier.weight.clone()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that differ in any bit: empty if all are the same."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def of_kind(log: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The lines of one kind."""
    return [line for line in log if line["kind"] == kind]


def untimed(value: Any) -> Any:
    """A record or receipt without what the clock measured."""
    if isinstance(value, dict):
        return {key: untimed(v) for key, v in value.items() if key not in ("seconds", "latency_ms")}
    return [untimed(v) for v in value] if isinstance(value, list) else value


def receipt_of(folder: Path) -> dict[str, Any]:
    """A receipt as it lies on the disk."""
    result: dict[str, Any] = json.loads((folder / "receipt.json").read_text())
    return result
