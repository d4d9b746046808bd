"""From panels to pictures: laying a figure out in pixels, and turning it into SVG and PNG.

A figure is drawn at 72 dpi, so that a point is a pixel of the page, and twice for the page: for a desk and for a phone,
since a wide plot scaled down to a phone has letters too small to read. Words stay text in the SVG and take the page's
font; each palette colour becomes a CSS variable on the page and a rule for dark mode in the file of its own.
"""

import html
import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from prunus.report.theme import FONT, LIGHT, PALETTE

WIDE, NARROW = 860, 360
_SCALE = 2  # of the PNG, for screens of today
_PAD = 16  # around a plot in a file of its own; on the page its card has one
_CHARACTER = (
    6.4  # width of a letter at the size of the keys, rounded up: page fonts are narrower than the one drawn with
)
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 11.5,
    "text.color": LIGHT["ink"],
    "text.parse_math": False,  # a `$` in a name is a `$`
    "figure.facecolor": LIGHT["paper"],
    "axes.facecolor": "none",
    "axes.edgecolor": LIGHT["line"],
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.xmargin": 0,
    "axes.ymargin": 0.08,
    "axes.labelcolor": LIGHT["muted"],
    "grid.color": LIGHT["line"],
    "grid.linewidth": 1,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.major.size": 4,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_joinstyle": "round",
    "patch.linewidth": 0,
    "path.simplify": True,
    "path.simplify_threshold": 0.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "prunus",  # the same run gives the same bytes
}


@dataclass(frozen=True)
class Key:
    """One entry of a panel's key."""

    label: str
    color: str
    dashes: Any = "-"
    width: float = 1.8


@dataclass(frozen=True)
class Panel:
    """One pair of axes: what stands over it, how high it is in pixels, and who draws in it."""

    title: str
    draw: Callable[[Any], None]
    height: float = 120
    keys: Sequence[Key] = field(default=())


@dataclass(frozen=True)
class Plot:
    """A drawn plot: for the page (`wide`, `narrow`) and as files (`svg`, `png`)."""

    name: str
    title: str
    note: str
    wide: str
    narrow: str
    svg: str
    png: bytes


def render(name: str, title: str, note: str, draw: Callable[[int], Figure]) -> Plot:
    """Draw a plot at both widths; `note` says in words what is to be seen."""
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the page's font has it, or a reader's system
        figure = draw(WIDE)
        wide, png = _svg(figure), _png(figure)
        narrow = _svg(draw(NARROW))
    return Plot(
        name, title, note, inline(wide, f"{name}-w", title), inline(narrow, f"{name}-n", title), standalone(wide), png
    )


def layout(
    width: int, panels: Sequence[Panel], columns: int = 1, left: float = 56, xlabel: str = "", joined: bool = True
) -> Figure:
    """Place panels row by row; `joined` panels of one column share the x axis, labelled once at the bottom."""
    columns = min(columns, len(panels))
    right, gap = 20.0, 36.0
    span = (width - left * columns - right - gap * (columns - 1) * (left < gap)) / columns
    keyed = [_flow(panel.keys, panel.title, span + left) for panel in panels]
    rows = [range(start, min(start + columns, len(panels))) for start in range(0, len(panels), columns)]
    bottoms = [20 if joined and r < len(rows) - 1 else 24.0 + 18 * bool(xlabel) for r in range(len(rows))]
    heads = [(26 if panels[row[0]].title else 4) + 18 * max(keyed[i][1] for i in row) for row in rows]
    height = 4 + sum(h + max(panels[i].height for i in row) + b for row, h, b in zip(rows, heads, bottoms, strict=True))
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    top = height - 4
    for r, row in enumerate(rows):
        tall = max(panels[i].height for i in row)
        for c, i in enumerate(row):
            x = left + c * (span + left)
            axes = figure.add_axes((x / width, (top - heads[r] - tall) / height, span / width, tall / height))
            axes.xaxis.set_major_locator(MaxNLocator(6 if span > 400 else 4, integer=True))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
            panels[i].draw(axes)
            if joined and r < len(rows) - 1:
                axes.tick_params(labelbottom=False)
            elif xlabel:
                axes.set_xlabel(xlabel, labelpad=5)
            _head(figure, width, height, x - left, top, panels[i], keyed[i][0])
        top -= heads[r] + tall + bottoms[r]
    return figure


def _flow(keys: Sequence[Key], title: str, room: float) -> tuple[list[tuple[float, int]], int]:
    """Where each key goes, as x and row; row 0 is the title's own, used only when all keys fit behind it."""
    widths = [24 + _CHARACTER * len(key.label) + 18 for key in keys]
    start = 7.4 * len(title) + 22
    if start + sum(widths) <= room:
        return [(start + sum(widths[:i]), 0) for i in range(len(keys))], 0
    places, x, row = [], 0.0, 1
    for wide in widths:
        if x and x + wide - 18 > room:
            x, row = 0.0, row + 1
        places.append((x, row))
        x += wide
    return places, row


def _head(
    figure: Figure, width: float, height: float, x: float, top: float, panel: Panel, places: list[tuple[float, int]]
) -> None:
    """Write a panel's title, and its key beside or under it."""
    base = top - 14
    figure.text(x / width, base / height, panel.title, weight="bold", size=12, va="baseline")
    for key, (dx, row) in zip(panel.keys, places, strict=True):
        at = (base - 18 * row) / height
        ends = ((x + dx) / width, (x + dx + 18) / width)
        mark = Line2D(ends, (at + 4 / height,) * 2, color=key.color, linestyle=key.dashes, linewidth=key.width)
        figure.add_artist(mark)
        figure.text((x + dx + 24) / width, at, key.label, size=11, color=LIGHT["muted"], va="baseline")


def _svg(figure: Figure) -> str:
    FigureCanvasSVG(figure)
    out = io.StringIO()
    figure.savefig(out, format="svg", dpi=72, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return out.getvalue()


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    out = io.BytesIO()
    width, height = figure.get_size_inches()
    pad = _PAD / 72
    box = Bbox([(-pad, -pad), (width + pad, height + pad)])
    figure.savefig(out, format="png", dpi=72 * _SCALE, bbox_inches=box, metadata={"Software": None})
    return out.getvalue()


def _clean(svg: str) -> str:
    """Drop what no reader needs: prologue, metadata (full of addresses), comments, the ids that nothing refers to."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: (?:(\w+) )?([\d.]+)px [^;\"]*", r"font-size: \2px; font-weight: \1", svg)
    svg = svg.replace("font-weight: ;", "").replace('font-weight: "', '"')
    used = set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", svg))
    names = {name for pair in used for name in pair}
    return re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in names else "", svg)


def inline(svg: str, prefix: str, label: str) -> str:
    """An SVG to stand inside a page with others: ids of its own, colours by variable, size by style sheet."""
    body = _clean(svg)
    body = re.sub(r' id="([^"]*)"', rf' id="{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', body)
    for role, (light, _) in PALETTE.items():
        body = body.replace(light, f"var(--{role})")
    box = re.search(r'viewBox="[^"]*"', body)
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{html.escape(label)}">'
    return head + body[body.index(">") + 1 :].strip()


def standalone(svg: str) -> str:
    """An SVG file: literal colours for every viewer, and rules that swap them where the reader prefers dark."""
    body = _clean(svg)
    rules = "".join(
        f'[style*="{prop}: {light}"]{{{prop}:{dark}!important}}'
        for light, dark in PALETTE.values()
        for prop in ("fill", "stroke")
    )
    style = f"<style>text{{font-family:{FONT}}}@media (prefers-color-scheme:dark){{{rules}}}</style>"
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', body)
    width, height = (float(side) + 2 * _PAD for side in found.groups()) if found else (0.0, 0.0)
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{width:g}" height="{height:g}" viewBox="{-_PAD} {-_PAD} {width:g} {height:g}">'
    )
    ground = f'<rect x="{-_PAD}" y="{-_PAD}" width="100%" height="100%" style="fill: {LIGHT["paper"]}"/>'
    rest = body[body.index(">") + 1 :]
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}{style}{ground}{rest}'
