"""The page: one HTML file out of runs and plots, with nothing in it that has to be fetched."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from prunus.report import numbers, tables
from prunus.report.canvas import Plot
from prunus.report.numbers import DASH, number, percent
from prunus.report.runs import COST_NAMES, Run, as_list, as_record
from prunus.report.tables import escape
from prunus.report.theme import CSS

_MOST_WARNINGS = 200


def single(run: Run, plots: Sequence[Plot]) -> str:
    """The page of one run."""
    about = " · ".join(_about(run))
    top = f'<header><p class="kicker">{about}</p><h1>{escape(sentence(run))}</h1></header>'
    return _document(f"{run.name}: {sentence(run)}", top + _body(run, plots))


def several(runs: Sequence[Run], together: Plot, plots: Sequence[Sequence[Plot]]) -> str:
    """The page of several runs: side by side first, then each on its own."""
    links = "".join(f'<a href="#run-{i}">{escape(run.name)}</a>' for i, run in enumerate(runs, 1))
    title = headline(runs)
    top = f'<header><p class="kicker">Prunus comparison</p><h1>{escape(title)}</h1><nav>{links}</nav></header>'
    parts = [top, _card("Side by side", tables.compare(runs)), _figure(together)]
    for i, (run, drawn) in enumerate(zip(runs, plots, strict=True), 1):
        head = f'<p class="kicker">{" · ".join(_about(run))}</p><h2>{escape(sentence(run))}</h2>'
        parts.append(f'<section class="run" id="run-{i}"><header>{head}</header>{_body(run, drawn)}</section>')
    return _document(title, "".join(parts))


def sentence(run: Run) -> str:
    """What happened, in one sentence."""
    what = next(
        (b.what for b in run.budgets if b.where is None and b.what in COST_NAMES and b.what != "density"), "params"
    )
    kept, metric = run.kept(what), run.metric
    parts = [f"{percent(kept)} of the {COST_NAMES[what]}"] if math.isfinite(kept) else []
    if metric is not None:
        value = metric.shrunk if math.isfinite(metric.shrunk) else metric.gated
        if math.isfinite(value):
            shown = tables.metric_value(metric, value, 1)
            parts.append(f"{shown} {metric.name}" if shown.endswith("%") else f"{metric.name} {shown}")
    if not run.finished:
        done = len(run.epochs)
        planned = numbers.count(run.start.get("epochs"))
        state = f"Unfinished after {done:,} of {planned} epochs" if done else "Unfinished, no epoch completed yet"
        return state + (": " + ", ".join(parts) + " so far" if parts else "")
    outcome = []
    by_size = "bytes" if math.isfinite(run.kept("bytes")) else "params"
    smaller = numbers.fraction(1, run.kept(by_size))
    if math.isfinite(smaller):
        outcome.append(f"{numbers.times(smaller)} smaller" if smaller > 1 else "no smaller")
    outcome.append(_met(run))
    if as_record(run.receipt.get("exactness")).get("ok") is False:
        outcome.append("but not equal to the gated model")
    result = ", ".join(part for part in outcome if part)
    text = ", ".join(parts) + (": " if parts and result else "") + result
    return text[:1].upper() + text[1:] or "Finished, nothing measured"


def headline(runs: Sequence[Run]) -> str:
    """What a comparison shows, in one sentence."""
    done = [run for run in runs if run.finished]
    met = sum(bool(run.budgets) and all(b.met for b in run.budgets) for run in done)
    free = sum(not run.budgets for run in done)
    counts = [
        (met, "met its budget" if met == 1 else "met their budgets"),
        (len(done) - met - free, "over budget"),
        (free, "without a budget"),
        (len(runs) - len(done), "unfinished"),
    ]
    return f"{len(runs)} runs: " + ", ".join(f"{n} {words}" for n, words in counts if n)


def _met(run: Run) -> str:
    known = [b.met for b in run.budgets if b.met is not None]
    if not known:
        return ""
    if all(known):
        return "budget met" if len(known) == 1 else f"all {len(known)} budgets met"
    missed = len(known) - sum(known)
    return "budget missed" if len(known) == 1 else f"{missed} of {len(known)} budgets missed"


def _about(run: Run) -> list[str]:
    details = run.details
    seed = details.get("seed")
    said = [run.name, run.start.get("model"), run.start.get("data"), details.get("method")]
    said += [f"seed {seed}" if seed is not None else None, details.get("device")]
    if math.isfinite(number(details.get("seconds"))):
        said.append(numbers.duration(details["seconds"]))
    plain = [x if isinstance(x, str) else json.dumps(x) for x in said if x not in (None, "", {}, [])]
    return [escape(x) for x in plain]


def _body(run: Run, plots: Sequence[Plot]) -> str:
    parts = [_facts(run)]
    if run.end is None:
        stale = " The receipt in its folder was made along the way and is not shown." if run.stale else ""
        parts.append(f'<p class="note">The log has no end line: the run is still going, or was stopped.{stale}</p>')
    suffix = "" if run.finished else " so far"
    parts.append(_card(f"Dense and deployed{suffix}", tables.costs(run)))
    if run.budgets:
        parts.append(_card("Budgets" if len(run.budgets) > 1 else "Budget", tables.budgets(run) + tables.LEGEND))
    quality = tables.metric(run) + tables.exactness(run)
    if quality:
        parts.append(_card("Quality and equality", quality))
    parts += [_figure(plot) for plot in plots]
    parts.append(_folds(run))
    return "".join(parts)


def _facts(run: Run) -> str:
    cells = []
    for what, title in (("params", "Parameters kept"), ("macs", "MACs kept"), ("bytes", "Bytes kept")):
        if math.isfinite(run.kept(what)):
            detail = f"{numbers.cost(what, run.deployed.get(what))} of {numbers.cost(what, run.dense.get(what))}"
            cells.append((title, percent(run.kept(what)), detail))
    metric = run.metric
    if metric is not None:
        final = math.isfinite(metric.shrunk)
        value = tables.metric_value(metric, metric.shrunk if final else metric.gated)
        dense = f"dense {tables.metric_value(metric, metric.dense)}" if math.isfinite(metric.dense) else ""
        name = metric.name[:1].upper() + metric.name[1:]
        cells.append((numbers.shorten(name, 40), value, dense or ("shrunk model" if final else "last epoch")))
    if not cells:
        return ""
    inside = (f"<div><dt>{escape(a)}</dt><dd>{escape(b)}<small>{escape(c)}</small></dd></div>" for a, b, c in cells)
    return f'<dl class="card facts">{"".join(inside)}</dl>'


def _folds(run: Run) -> str:
    folds = [_fold("All groups", f"{len(run.groups):,}", tables.groups(run))] if run.groups else []
    landing = tables.landing(run)
    if landing:
        folds.append(_fold("Landing", _closed(run), landing, opened=True))
    if run.warnings:
        counted = Counter(run.warnings)
        lines = [text + (f" ({n:,} times)" if n > 1 else "") for text, n in counted.items()]
        more = len(lines) - _MOST_WARNINGS
        lines = lines[:_MOST_WARNINGS] + ([f"and {more:,} more"] if more > 0 else [])
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        folds.append(_fold("Warnings", f"{len(run.warnings):,}", f"<ul>{items}</ul>", opened=True))
    else:
        folds.append(_fold("Warnings", "none", '<p class="note">The run gave no warnings.</p>'))
    rows = [("folder", str(run.folder)), *flatten(run.start.get("settings"))]
    folds.append(_fold("Settings", "", tables.names(rows)))
    versions = list(flatten(run.details.get("versions")))
    if versions:
        folds.append(_fold("Versions", "", tables.names(versions)))
    return f'<div class="card folds">{"".join(folds)}</div>'


def _closed(run: Run) -> str:
    closed = tables.closed(run)
    return f"{numbers.count(closed)} gate{'' if closed == 1 else 's'} closed" if math.isfinite(closed) else ""


def _fold(title: str, note: str, inside: str, opened: bool = False) -> str:
    said = f" <span>{escape(note)}</span>" if note else ""
    return f"<details{' open' if opened else ''}><summary>{escape(title)}{said}</summary>{inside}</details>"


def _card(title: str, inside: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{inside}</section>'


def _figure(plot: Plot) -> str:
    return (
        f'<section class="card"><h2>{escape(plot.title)}</h2><p class="note">{escape(plot.note)}</p>'
        f'<figure><div class="wide">{plot.wide}</div><div class="narrow">{plot.narrow}</div></figure></section>'
    )


def flatten(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """Nested settings as rows of dotted names."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    elif path:
        plain = isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))
        yield path, str(value) if plain else DASH if value is None else json.dumps(value, ensure_ascii=False)
    else:
        yield from (("", json.dumps(item)) for item in as_list(value))


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{CSS}</style></head>"
        f"<body><main>{body}<footer>Made by prunus report from the run's log and receipt. Every fraction is the "
        "fraction kept.</footer></main></body></html>\n"
    )
