"""What the command line shows: the receipt, and a run's headline, for people who see them for the first time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from prunus.cli import speech
from prunus.train import Run

WORDS = {"params": "parameters", "macs": "MACs", "bytes": "bytes", "density": "density"}
FILES = ("receipt.json", "small.safetensors", "report.html", "plots", "log.jsonl", "checkpoint")


def headline(run: Run, title: str, going_on: bool) -> str:
    """What is about to be trained, in two short lines."""
    dense, graph = run.gated.cost.dense(), run.gated.graph
    parts = [
        f"{dense['params']:,} parameters, {dense['macs']:,} MACs",
        f"{run.gated.units:,} gates in {_count(len(graph.groups), 'group')}",
        f"{_count(run.settings.epochs, 'epoch')} on {run.device}",
    ]
    return f"{'resuming' if going_on else 'training'} {title}, in {run.out}\n{'; '.join(parts)}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def plain_table(*columns: str) -> Table:
    """A table without lines: the first column to the left, the others to the right."""
    table = Table(box=None, pad_edge=False, show_header=any(columns), header_style="bold", padding=(0, 2, 0, 0))
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k == 0 else "right", no_wrap=k > 0)
    return table


def show(receipt: Mapping[str, Any], title: str, folder: Path) -> None:
    """A receipt as a table on stdout, and the files that hold it."""
    console = speech.out()
    console.print()
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print()
    console.print(_compared(receipt))
    console.print()
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, text in [*_budgets(receipt), *_facts(receipt)]:
        facts.add_row(name, text)
    written = [_file(folder / name) for name in FILES if (folder / name).exists()]
    facts.add_row("files", Text(f"{folder}: {', '.join(written)}"))
    console.print(facts)
    console.print()
    load = f'small = prunus.load(model, "{folder / "small.safetensors"}")'
    console.print(Text.assemble("to use it: ", (load, "bold")), soft_wrap=True)


def _compared(receipt: Mapping[str, Any]) -> Table:
    """Dense and deployed side by side."""
    dense, small = receipt["dense"], receipt["deployed"]
    table = plain_table("", "dense", "deployed", "kept", "")
    for what in ("params", "macs", "bytes"):
        a, b = dense[what], small[what]
        table.add_row(WORDS[what], f"{a:,}", f"{b:,}", f"{b / max(1, a):.1%}", f"{a / max(1, b):.1f}x smaller")
    for batch, measured in small["latency_ms"].items():
        if batch not in dense["latency_ms"]:
            continue
        a, b = dense["latency_ms"][batch]["median"], measured["median"]
        table.add_row(f"ms, batch of {batch}", f"{a:.3f}", f"{b:.3f}", "", _speed(a, b))
    metric = receipt["metric"]
    if metric:
        a, b = metric["dense"], metric["shrunk"]
        change = "" if a is None else f"{(b - a) * 100:+.2f} points"
        table.add_row(f"test {metric['name']}", "not trained" if a is None else f"{a:.2%}", f"{b:.2%}", "", change)
    return table


def _speed(dense: float, small: float) -> str:
    """How much faster: within a twentieth is the same.

    >>> _speed(2.0, 1.0), _speed(1.0, 0.98), _speed(1.0, 2.0)
    ('2.0x faster', 'as fast', '2.0x slower')
    """
    if not dense or not small:
        return ""
    if abs(dense / small - 1) < 0.05:
        return "as fast"
    return f"{dense / small:.1f}x faster" if dense > small else f"{small / dense:.1f}x slower"


def _budgets(receipt: Mapping[str, Any]) -> list[tuple[str, Text]]:
    """Every budget, its limit and whether it is met."""
    lines = []
    for budget in receipt["budgets"]:
        what, where, limit, deployed = (budget[key] for key in ("what", "where", "limit", "deployed"))
        verdict = ("met", "bold green") if budget["met"] else ("MISSED", "bold red")
        if what == "density":
            numbers, share = [f"{limit:.2%}", f"{deployed:.2%}"], ""
        else:
            numbers = [f"{limit:,.0f}", f"{deployed:,.0f}"]
            share = "" if where else f" ({limit / max(1, receipt['dense'][what]) * 100:.4g}%)"
        name = WORDS.get(what, what) + (f" of {where}" if where else "")
        text = Text.assemble(f"{name} at most {numbers[0]}{share}, deployed {numbers[1]}: ", verdict)
        lines.append(("budget", text))
    return lines


def _facts(receipt: Mapping[str, Any]) -> list[tuple[str, Text]]:
    """Equality, what the landing closed, and the time it took."""
    exact, metric, run = receipt["exactness"], receipt["metric"], receipt["run"]
    verdict = "equals the gated one" if exact["ok"] else "DIFFERS from the gated one"
    same = f"the small model {verdict}: largest relative difference {exact['max_rel_diff']:.1e}"
    if metric and metric["gated"] != metric["shrunk"]:
        same += f"; {metric['name']} gated {metric['gated']:.2%}, small {metric['shrunk']:.2%}"
    landing = run["landing"]
    closed = "nothing: training itself met every budget"
    if landing.get("closed"):
        gates = _count(landing["closed"], "gate")
        closed = f"{gates}: training left the deployed cost {above(landing.get('share', 0))}"
    seconds = run["seconds"]
    took = "" if seconds is None else f" in {seconds:.0f} s" if seconds < 90 else f" in {seconds / 60:.1f} minutes"
    return [
        ("equality", Text(same)),
        *([("form", Text("graph: the model's exported operations, rewritten"))] if receipt["form"] == "graph" else []),
        ("landing", Text(f"closed {closed}")),
        ("run", Text(f"{_count(run['epochs'], 'epoch')}{took} on {run['device']}, seed {run['seed']}")),
    ]


def _file(path: Path) -> str:
    if path.is_dir():
        return f"{path.name}/"
    return f"{path.name} ({size(path.stat().st_size)})" if path.suffix == ".safetensors" else path.name


def above(share: float) -> str:
    """By how much a cost was above its limit.

    >>> above(0.021), above(9.0)
    ('2.1% above a limit', '10.0 times a limit')
    """
    return f"{share:.1%} above a limit" if share < 1 else f"{share + 1:,.1f} times a limit"


def size(count: int) -> str:
    """Bytes for people.

    >>> size(950), size(35_840), size(4_000_000)
    ('950 B', '36 kB', '4.0 MB')
    """
    if count < 1000:
        return f"{count} B"
    return f"{count / 1e3:.0f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"
