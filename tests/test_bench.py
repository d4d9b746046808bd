"""The benchmark measures what it says, on a tiny setting."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from prunus import bench
from prunus.cli import main
from prunus.errors import ModelError


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["bench", "--model", "mlp", "--batch", "8", "--blocks", "3", "--steps", "2", "--device", "cpu", "--json"])
    assert not end.value.code
    result = json.loads(capsys.readouterr().out)
    found = result["models"]["mlp"]
    assert found["batch"] == 8
    assert found["step"]["gated_ms"] > 0
    assert set(found["step"]["ratio"]) == {"median", "spread"}
    assert set(found["latency_ms"]) == {"1", "8"}
    assert found["shrink_seconds"] > 0
    assert found["memory"]["gated"] > found["memory"]["dense"] > 4 * 4 * 266_610  # weights, gradients, two moments


def test_a_peak_is_what_was_held_at_once() -> None:
    x = torch.zeros(1000)

    def step() -> None:
        kept = x + 1  # 4,000 bytes
        (kept * 2).sum()  # 4,000 more, gone before the next
        (kept * 3).sum()

    peak = bench._peak(step, nn.Identity(), (x, x))
    assert 12_000 <= peak < 13_000


def test_what_it_cannot_measure() -> None:
    with pytest.raises(ModelError, match="one input tensor"):
        bench.measure(nn.Linear(2, 2), (torch.zeros(2, 2), torch.zeros(2, 2)))
    with pytest.raises(ModelError, match="class scores"):
        bench.measure(nn.Conv2d(1, 4, 3), torch.zeros(2, 1, 8, 8), batch=2)
