"""The plots of a report: seed 004's figure 1 (training dynamics) and seed 001's figure 3 (cost over training), and two
of our own (units per group, gate probabilities).

Where the papers plot density or FLOPs, we plot a cost in percent of the dense model's, and always say of which reading.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from prunus.errors import several
from prunus.report import numbers
from prunus.report.canvas import NARROW, Key, Panel, Plot, layout, render
from prunus.report.runs import COST_NAMES, Budget, Run, Series, as_list, column
from prunus.report.theme import LIGHT, SERIES

EXPECTED, DEPLOYED = SERIES[0], SERIES[1]
MOST_BARS = 40
_LIMIT = (0, (4, 3))
_TIGHT = 0.03  # limits under this cannot be told from nothing on a linear axis
_POINTS = 500  # of a line: more than a screen shows

Curve = tuple[Series, Series]


def of_run(run: Run, prefix: str = "") -> list[Plot]:
    """Draw the plots of one run."""
    return [dynamics(run, prefix), units(run, prefix), gates(run, prefix), cost(run, prefix)]


def dynamics(run: Run, prefix: str = "") -> Plot:
    """Loss, metric, cost and multiplier over the steps (seed 004, figure 1)."""
    budgets = run.logged_budgets
    panels = [_loss(run), _metric([run])]
    panels += _budget_panels(run)
    lines = [(run.budget_curve(i, "multiplier"), _color(i), "-") for i in range(len(budgets))]
    panels.append(Panel("Multiplier", _lines(lines, floor=True), 90))
    marked = [_marked(run, panel, first=i == 0) for i, panel in enumerate(panels)]
    label = _step_label(run)
    return render(
        f"{prefix}dynamics",
        "Training dynamics",
        "Loss, metric, cost and multiplier over the steps of the run. While the cost is over its limit the multiplier "
        "grows and presses gates shut; under it, the multiplier falls and the loss has the run to itself.",
        lambda width: layout(width, marked, xlabel=label),
    )


def compared(runs: Sequence[Run], prefix: str = "") -> Plot:
    """The dynamics of several runs, laid over each other."""
    what = next(
        (b.what for run in runs for b in run.logged_budgets[:1] if b.what in ("params", "macs", "bytes")), "params"
    )
    names = numbers.shorten_all([run.name for run in runs], 28)
    keys = [Key(name, _color(i), _dashes(i)) for i, name in enumerate(names)]

    def each(curve: Callable[[Run], Curve]) -> list[tuple[Curve, str, Any]]:
        return [(curve(run), _color(i), _dashes(i)) for i, run in enumerate(runs)]

    end = max(_last_step(run) for run in runs)
    limits = _limits(
        [(i, b) for i, run in enumerate(runs) for b in run.logged_budgets if b.what == what and not b.where]
    )
    panels = [
        Panel("Loss", _lines(each(_epoch_loss), log=True), keys=keys),
        _metric(runs),
        Panel(f"Expected {COST_NAMES[what]}, % of dense", _lines(each(lambda r: r.share("expected", what)), 1, limits)),
        Panel(f"Deployed {COST_NAMES[what]}, % of dense", _lines(each(lambda r: r.share("deployed", what)), 1, limits)),
        Panel("Largest multiplier", _lines(each(_largest_multiplier), floor=True), 90),
    ]
    return render(
        f"{prefix}compared",
        "Training dynamics, compared",
        "The same quantities of every run over its own steps; a dashed line is a limit.",
        lambda width: layout(width, [_spanning(panel, end) for panel in panels], xlabel="step"),
    )


def units(run: Run, prefix: str = "") -> Plot:
    """Units per group, before and after."""
    known = [g for g in run.groups if np.isfinite(g.size)]
    shown = known
    if len(known) > MOST_BARS:  # the ones that shrank most, in the model's order
        order = sorted(range(len(known)), key=lambda i: numbers.fraction(known[i].kept, known[i].size))
        shown = [known[i] for i in sorted(order[:MOST_BARS])]
    note = "Units kept in each group; the pale bar is the group before."
    if len(shown) < len(known):
        note += f" The {len(shown)} of {len(known)} groups that shrank most are drawn; the table below has all."

    def draw(width: int) -> Any:
        letters = 30 if width > NARROW else 15
        names = numbers.shorten_all([g.name for g in shown], letters)
        counts = [
            f"{numbers.count(g.kept)} of {numbers.count(g.size)}" + (f" {several(g.unit)}" if width > NARROW else "")
            for g in shown
        ]
        widest = max(map(len, counts), default=0) * 6.6 + 12

        def bars(axes: Any) -> None:
            axes.grid(False)
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(bottom=False, labelbottom=False)
            if not shown:
                _nothing(axes)
                return
            room = axes.get_position().width * width
            axes.set_xlim(0, room / max(room - widest, 1))  # the counts stand in a column behind the bars
            axes.set_ylim(len(shown) - 0.5, -0.5)
            rows = np.arange(len(shown))
            kept = np.nan_to_num([numbers.fraction(g.kept, g.size) for g in shown])
            axes.barh(rows, np.ones(len(shown)), height=0.62, color=LIGHT["track"])
            axes.barh(rows, kept, height=0.62, color=EXPECTED)
            for row, words in enumerate(counts):
                axes.text(axes.get_xlim()[1], row, words, ha="right", va="center_baseline", size=11)
            axes.set_yticks(rows, names, color=LIGHT["ink"])

        height = 22 * max(len(shown), 3)
        left = max((len(n) for n in names), default=8) * 7 + 14
        return layout(width, [Panel("", bars, height)], left=max(left, 56))

    return render(f"{prefix}units", "Units kept per group", note, draw)


def gates(run: Run, prefix: str = "") -> Plot:
    """Gate probabilities at the start, the middle and the end of training."""
    told = [line for line in run.epochs if sum(np.nan_to_num(_counts(line))) > 0]
    told = [line for line in told if line.get("phase") != "polish"] or told
    picked = sorted({0, len(told) // 2, len(told) - 1}) if told else []

    def histogram(line: dict[str, Any]) -> Callable[[Any], None]:
        share = np.nan_to_num(_counts(line))
        share = share / share.sum()

        def draw(axes: Any) -> None:
            edges = np.linspace(0, 1, len(share) + 1)
            axes.bar(edges[:-1], share, width=0.92 / len(share), align="edge", color=EXPECTED)
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1)
            axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "¼", "½", "¾", "1"])
            axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
            half = len(share) // 2
            axes.text(0.5, 0.93, f"{numbers.percent(share[half:].sum())} over ½", ha="center", va="top", size=11)

        return draw

    panels = [Panel(f"Epoch {numbers.count(told[i].get('epoch'))}", histogram(told[i]), 130) for i in picked]
    return render(
        f"{prefix}gates",
        "Gate probabilities",
        "How likely each gate is to be open, all groups together, at the start, in the middle and at the end of "
        "training: a run that has made up its mind has its gates at 0 and at 1.",
        lambda width: layout(
            width,
            panels or [Panel("Gates", _nothing, 90)],
            columns=1 if width <= NARROW else 3,
            xlabel="probability of being open" if panels else "",
            joined=False,
        ),
    )


def cost(run: Run, prefix: str = "") -> Plot:
    """Expected MACs and parameters over training, in percent of dense (seed 001, figure 3)."""

    def panel(what: str, color: str) -> Panel:
        limits = {numbers.fraction(b.limit, b.dense) for b in run.logged_budgets if b.what == what and not b.where}
        keys = [Key("expected", color), Key("dense", LIGHT["muted"], "-", 1.2)]
        keys += [Key("limit", LIGHT["ink"], _LIMIT, 1.2)] * bool(limits)
        draw = _lines([(run.share("expected", what), color, "-")], 1, limits, dense=True)
        title = {"macs": "MACs per example", "params": "Parameters"}[what]
        return _marked(run, Panel(f"{title}, % of dense", draw, 140, keys), first=False)

    panels = [panel("macs", SERIES[2]), panel("params", EXPECTED)]
    return render(
        f"{prefix}cost",
        "Expected cost over training",
        "What the network would cost, expected over its gates, had training stopped there.",
        lambda width: layout(width, panels, xlabel=_step_label(run)),
    )


def _loss(run: Run) -> Panel:
    x, y = _thin(run.x(), run.series("loss"))
    over_epochs = _epoch_loss(run)
    log = _wants_log(over_epochs[1] if run.epochs else y)

    def draw(axes: Any) -> None:
        if not np.isfinite([*y, *over_epochs[1]]).any():
            _nothing(axes)
            return
        if run.steps:
            axes.plot(x, y, color=LIGHT["muted"], linewidth=0.9, alpha=0.65)
        if run.epochs:
            _line(axes, over_epochs, LIGHT["ink"], "-")
        _scale(axes, log=log)

    keys = [Key("each step", LIGHT["muted"], "-", 0.9)] * bool(run.steps)
    keys += [Key("each epoch", LIGHT["ink"])] * bool(run.epochs)
    return Panel("Loss" + (" (log scale)" if log else ""), draw, 120, keys)


def _metric(runs: Sequence[Run]) -> Panel:
    curves = [(run.x(run.epochs), column(run.epochs, "metric", "value")) for run in runs]
    name = next((run.metric.name for run in runs if run.metric), "metric")
    several = len(runs) > 1
    lines = [(c, _color(i) if several else SERIES[2], _dashes(i) if several else "-") for i, c in enumerate(curves)]
    part = numbers.is_percent(name, [v for _, y in curves for v in y])
    return Panel(numbers.shorten(name[:1].upper() + name[1:], 40), _lines(lines, unit=1 if part else None, zoom=True))


def _budget_panels(run: Run) -> list[Panel]:
    budgets = run.logged_budgets
    shares = [numbers.fraction(b.limit, b.dense) for b in budgets]
    if len(budgets) == 1:
        lines = [(run.budget_curve(0, "expected"), EXPECTED, "-"), (run.budget_curve(0, "deployed"), DEPLOYED, "-")]
        keys = [Key("expected", EXPECTED), Key("deployed", DEPLOYED)]
        keys.append(Key(f"limit {numbers.percent(shares[0])}", LIGHT["ink"], _LIMIT, 1.2))
        title = numbers.shorten(budgets[0].label, 40)
        return [Panel(f"{title[:1].upper()}{title[1:]}, % of dense", _lines(lines, 1, {shares[0]}), 150, keys)]
    keys = [
        Key(f"{name}, limit {numbers.percent(share)}", _color(i), _dashes(i))
        for i, (name, share) in enumerate(zip(numbers.shorten_all([b.label for b in budgets], 28), shares, strict=True))
    ]
    if len(keys) > len(SERIES):
        keys = [*keys[: len(SERIES)], Key(f"and {len(budgets) - len(SERIES)} more", LIGHT["muted"], ":", 1.2)]
    panels: list[Panel] = []
    for reading in ("expected", "deployed"):
        lines = [(run.budget_curve(i, reading), _color(i), _dashes(i)) for i in range(len(budgets))]
        limits = _limits(list(enumerate(budgets))) if len(budgets) <= len(SERIES) else {}
        draw = _lines(lines, 1, limits)
        panels.append(Panel(f"{reading.capitalize()} cost, % of dense", draw, 130, keys if not panels else ()))
    return panels


def _lines(
    curves: Sequence[tuple[Curve, str, Any]],
    unit: int | None = None,
    limits: Any = (),
    *,
    log: bool = False,
    floor: bool = False,
    dense: bool = False,
    zoom: bool = False,
) -> Callable[[Any], None]:
    """Draw curves: in percent where `unit` is 1, with a dashed line at each limit (a mapping colours them)."""

    def draw(axes: Any) -> None:
        if not any(np.isfinite(y).any() for (_, y), _, _ in curves):
            _nothing(axes)
            return
        for (x, y), color, dashes in curves:
            _line(axes, (x, y), color, dashes)
        if dense:
            axes.axhline(1, color=LIGHT["muted"], linewidth=1.2)
        for limit in limits:
            if np.isfinite(limit):
                color = limits[limit] if isinstance(limits, dict) else LIGHT["ink"]
                axes.axhline(limit, color=color, linestyle=_LIMIT, linewidth=1.2)
        tight = unit == 1 and not zoom and any(0 < limit < _TIGHT for limit in limits)
        logarithmic = (log or tight) and _wants_log(np.concatenate([y for (_, y), _, _ in curves]))
        _scale(axes, unit, log=logarithmic, floor=floor or (unit == 1 and not zoom))

    return draw


def _line(axes: Any, curve: Curve, color: str, dashes: Any) -> None:
    x, y = _thin(*curve)
    alone = np.isfinite(y).sum() == 1  # a line of one point is invisible
    axes.plot(x, y, color=color, linestyle=dashes, marker="o" if alone else "", markersize=4, markeredgewidth=0)


def _scale(axes: Any, unit: int | None = None, *, log: bool = False, floor: bool = False) -> None:
    """Number the y axis: in percent where `unit` is 1, from zero where `floor`."""
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    elif floor:
        axes.set_ylim(bottom=0)
    show = (lambda v, _: f"{100 * v:.10g}%") if unit == 1 else (lambda v, _: numbers.small(v))
    axes.yaxis.set_major_formatter(FuncFormatter(show))


def _limits(budgets: Sequence[tuple[int, Budget]]) -> dict[float, str]:
    """Limits with the colours of their lines; a limit that several share is nobody's."""
    colors: dict[float, str] = {}
    for i, b in budgets:
        share = numbers.fraction(b.limit, b.dense)
        colors[share] = LIGHT["ink"] if share in colors else _color(i)
    return colors


def _marked(run: Run, panel: Panel, first: bool) -> Panel:
    """The same panel with the polish phase shaded and the landing marked, named on the first one."""
    landing, polish = run.landing_step(), run.polish()

    def draw(axes: Any) -> None:
        panel.draw(axes)
        end = _last_step(run)
        axes.set_xlim(0, end)
        top = {"y": 0.97, "va": "top", "size": 10.5, "color": LIGHT["muted"], "transform": axes.get_xaxis_transform()}
        label = "landing"
        if polish is not None:
            axes.axvspan(*polish, color=LIGHT["track"], alpha=0.45, zorder=0)
            wide = axes.get_window_extent().width * (polish[1] - polish[0]) / end > 48
            label = label if wide else "landing, then polish"
            if first and (wide or not np.isfinite(landing)):
                axes.text(x=sum(polish) / 2, s="polish", ha="center", **top)
        if np.isfinite(landing):
            axes.axvline(landing, color=LIGHT["muted"], linewidth=1.2)
            if first:
                axes.text(x=landing - 0.008 * end, s=label, ha="right", **top)

    return Panel(panel.title, draw, panel.height, panel.keys)


def _spanning(panel: Panel, end: float) -> Panel:
    """The same panel from step 0 to `end`, so that stacked panels share their steps."""

    def draw(axes: Any) -> None:
        panel.draw(axes)
        axes.set_xlim(0, end)

    return Panel(panel.title, draw, panel.height, panel.keys)


def _last_step(run: Run) -> float:
    return float(np.nanmax([1.0, *run.x(), *run.x(run.epochs)]))


def _nothing(axes: Any) -> None:
    axes.grid(False)
    axes.set_yticks([])
    axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center", va="center", color=LIGHT["muted"])


def _epoch_loss(run: Run) -> Curve:
    return (run.x(run.epochs), column(run.epochs, "loss")) if run.epochs else (run.x(), run.series("loss"))


def _largest_multiplier(run: Run) -> Curve:
    curves = [run.budget_curve(i, "multiplier") for i in range(len(run.logged_budgets))]
    curves = [c for c in curves if len(c[0]) == len(curves[0][0])]
    if not curves:
        return run.x(), np.full(len(run.lines), np.nan)
    return curves[0][0], np.fmax.reduce([y for _, y in curves])


def _counts(line: dict[str, Any]) -> Series:
    return np.array([numbers.number(n) for n in as_list(line.get("open"))], dtype=float)


def _thin(x: Series, y: Series) -> Curve:
    """Fewer points of a long line: of each stretch its lowest and its highest, so that no spike is lost."""
    if len(x) <= _POINTS:
        return x, y
    keep: list[int] = [0]
    for part in np.array_split(np.arange(len(x)), _POINTS // 2):
        known = part[np.isfinite(y[part])]
        keep += sorted({int(known[np.argmin(y[known])]), int(known[np.argmax(y[known])])}) if len(known) else [part[0]]
    keep.append(len(x) - 1)
    chosen = np.unique(keep)
    return x[chosen], y[chosen]


def _wants_log(y: Series) -> bool:
    y = y[np.isfinite(y)]
    return len(y) > 1 and bool(y.min() > 0 and y.max() / y.min() > 30)


def _color(i: int) -> str:
    return SERIES[i % len(SERIES)]


def _dashes(i: int) -> Any:
    """The second seven of a palette of seven are dotted."""
    return ("-", (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))[i // len(SERIES) % 3]


def _step_label(run: Run) -> str:
    each = numbers.number(run.start.get("steps_per_epoch"))
    return "step" + (f" ({numbers.count(each)} in an epoch)" if np.isfinite(each) else "")
