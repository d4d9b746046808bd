"""`prunus inspect`: the stable JSON and the table."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_shell import call

from prunus.cli.inspect import _percent


def described(*words: str) -> dict[str, Any]:
    said = call("inspect", *words, "--json")
    assert said.code == 0, said.err
    assert said.err == ""
    result: dict[str, Any] = json.loads(said.out)
    assert list(result) == ["groups", "frozen", "shrinkable"]
    for group in result["groups"]:
        assert list(group) == ["name", "size", "unit", "members", "share"]
        assert all(isinstance(member, str) for member in group["members"])
        assert set(group["share"]) == {"params", "macs"}
        assert all(0 < share <= 1 for share in group["share"].values())
    assert all(list(frozen) == ["axis", "operation", "module"] for frozen in result["frozen"])
    assert set(result["shrinkable"]) == {"params", "macs"}
    assert all(0 < share <= 1 for share in result["shrinkable"].values())
    return result


def test_lenet5_as_json() -> None:
    found = described("--model", "lenet5")
    sizes = {group["name"]: (group["size"], group["unit"]) for group in found["groups"]}
    assert sizes == {
        "conv1": (20, "map"), "conv2": (50, "map"), "fc1.inputs": (800, "input"), "fc1": (500, "neuron"),
    }  # fmt: skip
    share = {group["name"]: group["share"] for group in found["groups"]}
    # By hand: conv1 has 20 (25 + 1) numbers and conv2's weight 50 * 20 * 25, of 431,080; MACs of fc1 and fc2.
    assert share["conv1"]["params"] == pytest.approx((520 + 25_000) / 431_080)
    assert share["fc1"]["params"] == pytest.approx((400_500 + 5_000) / 431_080)
    assert share["fc1"]["macs"] == pytest.approx((400_000 + 5_000) / (288_000 + 1_600_000 + 400_000 + 5_000))
    assert found["shrinkable"]["params"] == pytest.approx(1 - 10 / 431_080)
    assert found["frozen"] == [{"axis": "fc2.weight[0]", "operation": "network output", "module": "fc2"}]


def test_a_users_factory(here: Path) -> None:
    found = described("--model", "clinets:residual")
    (stream,) = found["groups"]
    assert {"stem.weight[0]", "a.weight[0]", "a.weight[1]", "head.weight[1]"} <= set(stream["members"])
    assert described("--model", "clinets:bare", "--input", "2x3x8x8") == found
    found = described("--model", "clinets:small", "--data", "digits", "--units", "weights")
    assert {group["unit"] for group in found["groups"]} == {"weight"}
    found = described("--model", "clinets:small", "--data", "digits", "--units", "4x16")
    assert [(g["name"], g["size"], g["unit"]) for g in found["groups"]] == [
        ("1.weight", 16, "block"), ("3.weight", 2, "block"),
    ]  # fmt: skip
    for kind, said in (("4x16", "blocks of 4x16 weights"), ("2:4", "2 of every 4 of its weights at most")):
        shown = call("inspect", "--model", "clinets:small", "--data", "digits", "--units", kind)
        assert (shown.code, said in shown.out) == (0, True)


def test_the_table(here: Path) -> None:
    said = call("inspect", "--model", "lenet5")
    assert said.code == 0
    for word in ("431,080 parameters", "conv2", "50", "maps", "network output", "can be reached: params=0.0"):
        assert word in said.out
    assert "\x1b" not in said.out


def test_the_smallest_budget_can_be_asked_for() -> None:
    for value in (0.000177, 0.00654, 0.12345, 0.9):
        text = _percent(value)
        assert float(text[:-1]) / 100 >= value
        assert float(text[:-1]) / 100 <= value * 1.11
