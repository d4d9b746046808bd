"""The tables of a report."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from prunus.report import numbers
from prunus.report.numbers import DASH, number, percent, times
from prunus.report.runs import COSTS, READINGS, Budget, Metric, Run, as_list, as_record, budget_label

LEGEND = (
    '<dl class="legend">'
    "<dt>expected</dt><dd>the mean cost when every gate is drawn with its probability; what training can push on</dd>"
    "<dt>deployed</dt><dd>the cost of the shrunk model, counted on its weights; this is what the limit binds</dd>"
    "<dt>paper</dt><dd>the share of gates that are open, weighted by group size, as the papers count</dd></dl>"
)
_TITLES = {"params": "Parameters", "macs": "MACs per example", "bytes": "Bytes"}


def escape(value: Any) -> str:
    """Make a text safe to stand in HTML, whatever it holds."""
    return html.escape(numbers.text(value))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Lay out a table of ready HTML cells; the first of each row is its heading."""
    rows = [[row[0], *map(_unbroken, row[1:])] for row in rows]
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    thead = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="scroll"><table class="{kind}">{thead}<tbody>{body}</tbody></table></div>'


def costs(run: Run) -> str:
    """Dense against deployed, with latency."""
    rows = []
    for what in COSTS:
        dense, deployed = run.dense.get(what), run.deployed.get(what)
        if math.isfinite(number(dense)) or math.isfinite(number(deployed)):
            smaller = numbers.fraction(dense, deployed)
            rows.append(
                [
                    _TITLES[what],
                    numbers.cost(what, dense),
                    numbers.cost(what, deployed),
                    percent(run.kept(what)),
                    _gain(smaller, "smaller" if what == "bytes" else "fewer", "larger" if what == "bytes" else "more"),
                ]
            )
    for batch in batches([run]):
        before, after = timing(run.dense, batch), timing(run.deployed, batch)
        times_told = (numbers.latency(before), numbers.latency(after))
        rows.append([f"Latency, batch {escape(batch)}", *times_told, "", _speed(run, batch)])
    if not rows:
        return '<p class="note">No costs were recorded.</p>'
    return table(["", "dense", "deployed", "kept", "gain"], rows)


def budgets(run: Run) -> str:
    """Each budget with its limit and the three readings of its cost."""
    rows = []
    for b in run.budgets:
        row = [escape(b.label[:1].upper() + b.label[1:]), _cost(b, b.limit)]
        rows.append([*row, *(_reading(b, reading) for reading in READINGS), _met(b, run)])
    return table(["", "limit", *READINGS, "met" if run.finished else "met now"], rows)


def metric(run: Run) -> str:
    """The metric of the dense, the gated and the shrunk model."""
    m = run.metric
    if m is None:
        return ""
    values = [metric_value(m, v) if math.isfinite(v) else "not measured" for v in (m.dense, m.gated, m.shrunk)]
    return table(["", "dense", "gated", "shrunk"], [[escape(m.name[:1].upper() + m.name[1:]), *values]])


FORMS = {
    "eager": " The shrunk model is of the dense one's own class.",
    "graph": " The shrunk model is the dense one's exported operations, rewritten.",
}


def exactness(run: Run) -> str:
    """Whether the shrunk model equals the gated one, as a sentence."""
    found = as_record(run.receipt.get("exactness"))
    if not found:
        return ""
    ok = found.get("ok")
    mark = verdict(ok if isinstance(ok, bool) else None, "Equal.", "Not equal.")
    largest, tolerance = numbers.small(found.get("max_rel_diff")), numbers.small(found.get("tolerance"))
    return (
        f'<p class="said">{mark} The outputs of the shrunk and of the gated model differ by at most {largest} '
        f"(relative), over {inputs(found)}; up to {tolerance} is allowed."
        f"{FORMS.get(str(run.receipt.get('form')), '')}</p>"
    )


def inputs(found: dict[str, Any]) -> str:
    """How many inputs were compared, or which."""
    told = found.get("inputs")
    return f"{numbers.count(told)} inputs" if math.isfinite(number(told)) else escape(told or "the inputs tried")


def groups(run: Run) -> str:
    """Every group with its units before and after."""
    rows = (
        [
            f"<code>{escape(g.name)}</code>",
            escape(g.unit),
            numbers.count(g.size),
            numbers.count(g.kept),
            percent(numbers.fraction(g.kept, g.size)),
        ]
        for g in run.groups
    )
    return table(["group", "unit", "before", "after", "kept"], rows)


def closed(run: Run) -> float:
    """How many gates the landing closed."""
    told = as_record(run.details.get("landing")).get("closed")
    return number(told if told is not None else as_record(run.landing).get("closed"))


def landing(run: Run) -> str:
    """What the landing did to each cost."""
    if run.landing is None and not as_record(run.details.get("landing")):
        return ""
    found = as_record(run.landing) or as_record(run.details.get("landing"))
    epoch, shut = numbers.count(found.get("epoch")), closed(run)
    said = "The landing" + (f", after epoch {epoch}," if epoch != DASH else "")
    said += f" closed {numbers.count(shut)} gate{'' if shut == 1 else 's'} to bring the deployed cost under the limit."
    if shut == 0:
        said = said.split(" closed")[0] + " had nothing to close: the budget was met by training alone."
    rows = []
    for item in map(as_record, as_list(found.get("cost"))):
        what = str(item.get("what"))
        label = budget_label(what, item.get("where"))
        before, after = item.get("before"), item.get("after")
        rows.append([escape(label[:1].upper() + label[1:]), numbers.cost(what, before), numbers.cost(what, after)])
    return f"<p>{said}</p>" + (table(["deployed cost", "before", "after"], rows) if rows else "")


def names(rows: Iterable[tuple[str, str]]) -> str:
    """Settings and the like: names and values."""
    cells = [[f"<code>{escape(k)}</code>", escape(v)] for k, v in rows]
    return table([], cells, "names") if cells else '<p class="note">None were recorded.</p>'


def compare(runs: Sequence[Run]) -> str:
    """Runs side by side, a column each."""
    rows: list[list[str]] = [["Status", *("finished" if r.finished else "unfinished" for r in runs)]]

    def add(title: str, cells: Iterable[str]) -> None:
        told = list(cells)
        if any(cell != DASH for cell in told):
            rows.append([title, *told])

    add("Method", (_plain(r.details.get("method")) for r in runs))
    for what in COSTS:
        add(f"{_TITLES[what]} kept", (_share(numbers.cost(what, r.deployed.get(what)), r.kept(what)) for r in runs))
    for batch in batches(runs):
        add(f"Latency, batch {escape(batch)}", (numbers.latency(timing(r.deployed, batch)) for r in runs))
        add("&ensp;over dense", (_speed(r, batch) for r in runs))
    for name in dict.fromkeys(r.metric.name for r in runs if r.metric):
        for stage in ("dense", "gated", "shrunk"):
            found = (r.metric if r.metric and r.metric.name == name else None for r in runs)
            add(f"{escape(name)}, {stage}", (metric_value(m, getattr(m, stage)) if m else DASH for m in found))
    for label in dict.fromkeys(b.label for r in runs for b in r.budgets):
        rows_of = [next((b for b in r.budgets if b.label == label), None) for r in runs]
        add(f"Budget: {escape(label)}", (_cost(b, b.limit) if b else DASH for b in rows_of))
        for reading in READINGS:
            add(f"&ensp;{reading}", (_reading(b, reading) if b else DASH for b in rows_of))
        add("&ensp;met", (_met(b, r) if b else DASH for r, b in zip(runs, rows_of, strict=True)))
    add("Gates closed at landing", (numbers.count(closed(r)) for r in runs))
    exact = [as_record(r.receipt.get("exactness")) for r in runs]
    add("Largest relative difference", (numbers.small(e.get("max_rel_diff")) for e in exact))
    add("Form", (_plain(r.receipt.get("form")) for r in runs))
    add("Epochs done", (numbers.count(len(r.epochs)) for r in runs))
    add("Time", (numbers.duration(r.details.get("seconds")) for r in runs))
    add("Seed", (_plain(r.details.get("seed")) for r in runs))
    add("Device", (_plain(r.details.get("device")) for r in runs))
    add("Warnings", (numbers.count(len(r.warnings)) for r in runs))
    return table(["", *(escape(r.name) for r in runs)], rows, "runs") + LEGEND


def batches(runs: Sequence[Run]) -> list[str]:
    """Batch sizes that any run was timed at, in order."""
    found = dict.fromkeys(
        str(b) for run in runs for side in (run.dense, run.deployed) for b in as_record(side.get("latency_ms"))
    )
    return sorted(found, key=lambda b: (not b.isdecimal(), int(b) if b.isdecimal() else 0, b))


def timing(side: dict[str, Any], batch: str) -> Any:
    """One latency of one model."""
    return as_record(side.get("latency_ms")).get(batch)


def metric_value(m: Metric, value: float, places: int = 2) -> str:
    """A value of a metric, in percent where it is a share."""
    whole = numbers.is_percent(m.name, [m.dense, m.gated, m.shrunk])
    return percent(value, places) if whole else numbers.small(value)


def verdict(ok: bool | None, yes: str = "met", no: str = "missed") -> str:
    """A verdict in words, with a mark for the eye and a colour that is never the only sign."""
    if ok is None:
        return DASH
    return f'<span class="good">✓ {yes}</span>' if ok else f'<span class="bad">✗ {no}</span>'


def _unbroken(cell: str) -> str:
    """Keep a number and its unit on one line where a narrow table wraps."""
    return re.sub(r"(?<=\d) (?=(?:µs|ms|s|min|h|k?B|[MGT]B|[mbtr]+illion)\b)|(?<=±) ", "&nbsp;", cell)


def _met(b: Budget, run: Run) -> str:
    return verdict(b.met, no="missed" if run.finished else "not yet")


def _reading(b: Budget, reading: str) -> str:
    value: float = getattr(b, reading)
    return percent(value) if reading == "paper" and value <= 1 else _cost(b, value)


def _cost(b: Budget, value: float) -> str:
    share = numbers.fraction(value, b.dense) if b.what != "density" else math.nan
    return _share(numbers.cost(b.what, value), share)


def _share(shown: str, share: float) -> str:
    return f"{shown} <small>{percent(share)}</small>" if math.isfinite(share) else shown


def _speed(run: Run, batch: str) -> str:
    before, after = as_record(timing(run.dense, batch)), as_record(timing(run.deployed, batch))
    ratio = numbers.fraction(before.get("median"), after.get("median"))
    return _gain(ratio, "faster", "slower")


def _gain(ratio: float, better: str, worse: str) -> str:
    """Say a gain in words, so that nobody has to remember which way the ratio goes."""
    if not math.isfinite(ratio) or ratio <= 0:
        return DASH
    if 0.95 < ratio < 1.05:
        return "the same" if ratio == 1 else "about the same"
    return f"{times(ratio)} {better}" if ratio > 1 else f"{times(1 / ratio)} {worse}"


def _plain(value: Any) -> str:
    return DASH if value is None else escape(value)
