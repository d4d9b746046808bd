"""The command line, called as a shell would call it but without starting Python anew each time."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunus.cli import main

NETS = """
import torch
from torch import nn

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)
    def forward(self, x):
        return self.fc(x.flatten(1)) if x.sum() > 0 else self.fc(-x.flatten(1))

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.a = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)
    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head((x + torch.relu(self.a(x))).mean((2, 3)))

def branching(): return Branching()
def residual(): return Residual(), torch.randn(2, 3, 8, 8)
def bare(): return Residual()
def number(): return 7
def raising(): raise RuntimeError("no weights today")
def empty(): return nn.ReLU(), torch.randn(2, 64)
def needs(width): return nn.Linear(width, 10)
def small(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
def few(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4))
instance = nn.Linear(64, 10)
"""

DATA = """
import torch

def _some(n=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % 10

def good(): return (*_some(), *_some())
def none(): return torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long), *_some()
def below():
    x, y = _some()
    return x, y - 1, x, y
def nan():
    x, y = _some()
    x = x.clone()
    x[3, 0, 2, 1] = float("nan")
    return x, y, x, y
"""


@dataclass(frozen=True)
class Said:
    """What a command said."""

    code: int
    out: str
    err: str


def call(*words: Any) -> Said:
    """Run a command in the current folder."""
    out, err = io.StringIO(), io.StringIO()
    path = list(sys.path)
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main([str(word) for word in words])
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.path[:] = path
        for name in ("clinets", "clidata"):
            sys.modules.pop(name, None)
    return Said(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[Path]:
    """A folder with a user's modules, as the current one."""
    (folder / "clinets.py").write_text(NETS)
    (folder / "clidata.py").write_text(DATA)
    before = os.getcwd()
    dont_write = sys.dont_write_bytecode
    os.chdir(folder)
    sys.dont_write_bytecode = True  # a module that a test rewrites within a second must be read anew
    try:
        yield folder
    finally:
        os.chdir(before)
        sys.dont_write_bytecode = dont_write


SHORT = (
    "train", "--model", "mlp", "--data", "digits", "--budget", "params=50%", "--epochs", "3", "--batch-size", "256",
    "--device", "cpu",
)  # fmt: skip


def receipt(folder: Path) -> dict[str, Any]:
    """The receipt in a run's folder."""
    result: dict[str, Any] = json.loads((folder / "receipt.json").read_text())
    return result
