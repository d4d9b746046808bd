"""`prunus bench`: ratios of time and memory, as a table or as JSON."""

import json
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from prunus import bench as measuring
from prunus.cli import speech
from prunus.cli.sources import device_of, model_and_inputs
from prunus.cli.tables import plain_table


def bench(
    models: Sequence[str], batch: int, blocks: int, steps: int, inputs: str | None, device: str | None, as_json: bool
) -> None:
    """Run the command."""
    device = device_of(device)
    # All of them are made, and so checked, before minutes pass.
    made = [(name, *model_and_inputs(name, measuring.SEED, None, inputs)) for name in models]
    result: dict[str, Any] = {"machine": measuring.machine(), "models": {}}
    for name, model, example in made:
        with speech.err().status(f"measuring {name}"):
            found = measuring.measure(model, example, batch=batch, blocks=blocks, steps=steps, device=device)
        result["models"][name] = found
    if as_json:
        print(json.dumps(result, indent=1))  # noqa: T201 (what was asked for, and nothing else)
        return
    show(result)


def show(result: dict[str, Any]) -> None:
    """A table on stdout."""
    console = speech.out()
    for name, found in result["models"].items():
        step, memory = found["step"], found["memory"]
        table = plain_table(f"{name} on {found['device']}", "dense", "prunus", "ratio", "spread")
        ratio = step["ratio"]
        table.add_row(
            f"training step, batch of {found['batch']} (gated), ms",
            f"{step['dense_ms']:.3f}", f"{step['gated_ms']:.3f}", f"{ratio['median']:.3f}", f"{ratio['spread']:.3f}",
        )  # fmt: skip
        table.add_row(
            "its peak memory, MB",
            f"{memory['dense'] / 1e6:.2f}", f"{memory['gated'] / 1e6:.2f}", f"{memory['ratio']:.3f}", "",
        )  # fmt: skip
        for size, latency in found["latency_ms"].items():
            a, b = latency["dense"]["median"], latency["shrunk"]["median"]
            table.add_row(f"forward pass, batch of {size} (shrunk), ms", f"{a:.3f}", f"{b:.3f}", f"{b / a:.3f}", "")
        console.print(table)
        console.print(Text(f"prunus.shrink took {found['shrink_seconds']:.2f} s"))
        console.print()
    versions = result["machine"]["versions"]
    console.print(
        Text(
            f"{result['machine']['threads']} threads, torch {versions['torch']}; ratios are prunus / dense, "
            "their spread the interquartile range over blocks that take turns; shrunk to "
            f"{measuring.TARGET:.0%} of the parameters"
        ),
    )
