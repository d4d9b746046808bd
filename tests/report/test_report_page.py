import json
import os
import re
import warnings
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.style
import pytest
from report_fakes import MakeRun, fake_lines, put
from report_pages import Page, check_png, page_of

from prunus.errors import ArtefactError, OutputError
from prunus.report import canvas, write


@pytest.fixture
def no_png(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the pictures where only the page is looked at: they are a third of the time."""
    monkeypatch.setattr("prunus.report.canvas._png", lambda figure: b"")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each plot once instead of three times, where it is not the plots that are looked at."""

    def once(name: str, title: str, note: str, draw: Any) -> canvas.Plot:
        with matplotlib.style.context(["default", canvas._STYLE]), warnings.catch_warnings(action="ignore"):
            svg = canvas._svg(draw(canvas.NARROW))
        return canvas.Plot(name, title, note, "", canvas.inline(svg, name, title), canvas.standalone(svg), b"")

    monkeypatch.setattr("prunus.report.plots.render", once)


@pytest.fixture
def blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing, where only words and files are looked at."""

    def nothing(name: str, title: str, note: str, draw: Any) -> canvas.Plot:
        return canvas.Plot(name, title, note, "", "", "<svg/>", b"")

    monkeypatch.setattr("prunus.report.plots.render", nothing)


def report(*folders: Path) -> Page:
    return page_of(write(list(folders), folders[0].parent / "report" / "index.html"))


def test_one_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(warnings=("conv2 is frozen.", "conv2 is frozen."))
    out = write([run], tmp_path / "deep" / "er" / "report.html")
    assert out == tmp_path / "deep" / "er" / "report.html"
    page = page_of(out)
    assert "10.0% of the parameters, 97.8% accuracy: 10.0x smaller, budget met" in page.text
    assert "✓ met" in page.text
    assert "✓ Equal." in page.text
    assert "42,936" in page.text
    assert "1.42 ms\xa0".replace("\xa0", " ") in page.text.replace("\xa0", " ")
    assert "conv2 is frozen. (2 times)" in page.text
    assert "dual.restarts" in page.text
    assert "3 gates closed" in page.text
    for word in ("expected", "deployed", "paper", "landing", "polish", "dense"):
        assert word in page.text
    assert page.tags["svg"] == 8  # four plots, each for a desk and for a phone
    assert sorted(p.name for p in out.parent.iterdir()) == ["plots", "report.html"]
    files = sorted((out.parent / "plots").iterdir())
    assert [p.name for p in files] == [
        f"{n}.{e}" for n in ("cost", "dynamics", "gates", "units") for e in ("png", "svg")
    ]
    for path in files:
        if path.suffix == ".png":
            check_png(path)
        else:
            assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.usefixtures("no_png")
def test_the_same_run_gives_the_same_bytes(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(epochs=3, polish=1)
    first, second = (write([run], tmp_path / name / "r.html") for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    for path in (first.parent / "plots").iterdir():
        assert path.read_bytes() == (second.parent / "plots" / path.name).read_bytes()


@pytest.mark.usefixtures("no_png")
def test_several_runs(make_run: MakeRun, tmp_path: Path) -> None:
    lines, _ = fake_lines(limit=0.05, finished=False)
    cut = put(tmp_path / "cut", lines[: len(lines) // 2])
    page = report(make_run("a", epochs=9, polish=2), make_run("b", limit=0.3, seed=2), cut)
    assert "3 runs: 2 met their budgets, 1 unfinished" in page.text
    assert "Side by side" in page.text
    assert {"run-1", "run-2", "run-3"} <= set(page.ids)
    names = {p.name for p in (tmp_path / "report" / "plots").iterdir()}
    assert {"compared.svg", "compared.png", "1-a-dynamics.svg", "3-cut-units.png"} <= names
    assert len(names) == 2 * (1 + 3 * 4)


@pytest.mark.usefixtures("blank")
def test_runs_whose_folders_are_called_alike(make_run: MakeRun) -> None:
    options: dict[str, Any] = {"epochs": 1, "polish": 0, "per_epoch": 4}
    a, b = make_run("x/run", **options), make_run("y/run", **options)
    page = report(a, b, b)
    for name in ("x/run", "y/run", "y/run (3)"):
        assert name in page.text


@pytest.mark.parametrize(
    "options, said",
    [
        ({"epochs": 1, "polish": 0}, "97.8% accuracy"),
        ({"epochs": 2, "polish": 1, "every": 10**9}, "97.8% accuracy"),  # no step lines
        ({"epochs": 3, "polish": 0, "every": 1, "nan_at": tuple(range(5, 60))}, "55 of 120 recorded losses"),
        ({"epochs": 3, "polish": 0, "every": 1, "nan_at": tuple(range(999))}, "120 of 120 recorded losses"),
        ({"epochs": 2, "polish": 0, "layers": tuple(f"block.{i}" for i in range(12))}, "and 5 more"),
        ({"epochs": 4, "polish": 1, "limit": 0.01}, "limit 1.0%"),
        ({"epochs": 2, "polish": 0, "groups": {}}, "nothing recorded"),
        ({"epochs": 2, "model": "m" * 500, "warnings": tuple(f"warning {i}" for i in range(1000))}, "and 800 more"),
        ({"epochs": 2, "polish": 0, "groups": {f"s.{i}.{'block' * 20}": (8, "head") for i in range(300)}}, "s.299."),
    ],
    ids=["one epoch", "no steps", "nan", "all nan", "budgets", "tight", "no groups", "long", "300 groups"],
)  # fmt: skip
@pytest.mark.usefixtures("no_png")
def test_odd_runs(make_run: MakeRun, options: dict[str, Any], said: str) -> None:
    text = report(make_run(**options)).text
    assert said in text
    assert str(options.get("model", "")) in text


@pytest.mark.parametrize("keep", [1, 2, 60])
@pytest.mark.usefixtures("quick")
def test_unfinished_runs(tmp_path: Path, keep: int) -> None:
    lines, _ = fake_lines(finished=False, warnings=())
    page = report(put(tmp_path / "run", lines[:keep]))
    assert "Unfinished" in page.text
    assert "no end line" in page.text
    assert "✓ Equal" not in page.text


@pytest.mark.usefixtures("quick")
def test_a_killed_run_with_half_a_last_line(tmp_path: Path) -> None:
    folder = put(tmp_path / "run", fake_lines(finished=False)[0][:40])
    with open(folder / "log.jsonl", "a") as log:
        log.write('{"kind":"step","st')
    assert "Unfinished" in report(folder).text


@pytest.mark.usefixtures("blank")
def test_the_receipt_at_the_end_of_the_log_will_do(make_run: MakeRun) -> None:
    run = make_run(epochs=2, polish=0)
    (run / "receipt.json").unlink()
    assert "✓ Equal" in report(run).text


@pytest.mark.usefixtures("blank")
def test_a_receipt_without_metric_and_run(tmp_path: Path) -> None:
    lines, receipt = fake_lines(epochs=2, polish=1)
    receipt |= {"metric": None, "run": None, "exactness": None}
    lines = [{k: v for k, v in line.items() if k != "metric"} for line in lines]
    page = report(put(tmp_path / "run", lines, receipt))
    assert "of the parameters: " in page.text
    assert "Quality and equality" not in page.text


@pytest.mark.usefixtures("blank")
def test_a_receipt_of_an_earlier_run_is_not_this_runs(tmp_path: Path) -> None:
    lines, receipt = fake_lines(epochs=2, polish=0, finished=False)
    page = report(put(tmp_path / "run", lines, receipt))
    assert "Unfinished after 2 of 2 epochs" in page.text
    assert "was made along the way" in page.text
    assert "✓ Equal" not in page.text


@pytest.mark.usefixtures("blank")
@pytest.mark.parametrize("paper, shown", [(0.37, "37.0%"), (215_540, "215,540 50.0%"), (None, "–")])
def test_the_papers_reading_is_a_share_or_a_cost(tmp_path: Path, paper: float | None, shown: str) -> None:
    lines, receipt = fake_lines(epochs=2, polish=0)
    receipt["budgets"][0]["paper"] = paper
    assert shown in report(put(tmp_path / "run", lines, receipt)).text


@pytest.mark.usefixtures("quick")
def test_a_run_without_budgets(tmp_path: Path) -> None:
    lines, receipt = fake_lines(epochs=2, polish=0)
    for line in lines:
        line.update({"budgets": []} if "budgets" in line else {})
    page = report(put(tmp_path / "run", lines, {**receipt, "budgets": []}))
    assert "Expected cost over training" in page.text
    assert "✓ met" not in page.text


@pytest.mark.usefixtures("blank")
def test_missed_and_inexact_are_said_aloud(tmp_path: Path) -> None:
    lines, receipt = fake_lines(epochs=2, polish=0)
    receipt["exactness"].update(ok=False, max_rel_diff=0.02)
    receipt["budgets"][0].update(met=False, paper=None)
    page = report(put(tmp_path / "run", lines, receipt))
    assert "budget missed, but not equal to the gated model" in page.text
    assert "✗ missed" in page.text
    assert "✗ Not equal." in page.text


@pytest.mark.usefixtures("quick")
def test_a_density_budget_is_in_fractions(tmp_path: Path) -> None:
    lines, receipt = fake_lines(epochs=2, polish=0)
    row = {"what": "density", "where": None, "limit": 0.1, "expected": 0.0931, "deployed": 0.0952, "paper": None}
    lines[0]["budgets"] = [{**row, "dense": None}]
    receipt["budgets"] = [{**row, "met": True}]
    page = report(put(tmp_path / "run", lines, receipt))
    assert "Density" in page.text
    assert "9.5%" in page.text


HOSTILE = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(1)>${1}$x^2$ \x00\x1b\u202e\ud800 日本"


@pytest.mark.usefixtures("quick")
def test_hostile_names_are_text(tmp_path: Path) -> None:
    name = HOSTILE
    groups = {name: (8, name), f"{name}2": (9, "map")}
    lines, receipt = fake_lines(epochs=3, polish=1, groups=groups, layers=(name, "b"), warnings=(name,), model=name)
    lines[0].update(
        data=name, method=name, settings={name: {name: name}}, versions={name: name}, device=name, seed=name
    )
    receipt["metric"]["name"] = name
    receipt["run"] = None
    receipt["exactness"]["inputs"] = name
    receipt["dense"]["latency_ms"] = receipt["deployed"]["latency_ms"] = {name: {"median": 1.0, "spread": 0.1}}
    folder = put(tmp_path / "<b>&amp;run", lines, receipt)
    page = report(folder, folder)
    assert "img" not in page.tags
    assert "<script>alert(1)" in page.text
    assert "&amp;run" in page.text
    for path in (tmp_path / "report" / "plots").glob("*.svg"):
        ET.parse(path)


@pytest.mark.usefixtures("quick")
def test_junk_in_any_field_is_drawn(tmp_path: Path) -> None:
    folders = []
    for number, junk in enumerate((None, "x", {"a": None}, [{}])):
        lines, _ = fake_lines(epochs=2, polish=1, per_epoch=4)
        kinds = ("start", "step", "epoch", "landing", "end")
        for kind in kinds if junk is None else ("epoch",):
            broken = [{k: v if k in ("kind", "schema") or line["kind"] != kind else junk for k, v in line.items()}
                      for line in lines]  # fmt: skip
            folders.append(put(tmp_path / f"run-{number}-{kind}", broken))
    page = Page(write(folders, tmp_path / "report" / "index.html").read_text())
    assert page.tags["section"] > len(folders)


def test_broken_logs_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    with pytest.raises(ArtefactError, match="no run log"):
        write([tmp_path / "nowhere"], out)
    with pytest.raises(ArtefactError, match="no start line"):
        write([put(tmp_path / "empty", [])], out)
    with pytest.raises(ArtefactError, match="schema 9"):
        write([put(tmp_path / "new", [{"kind": "start", "schema": 9}])], out)
    (put(tmp_path / "bad", []) / "log.jsonl").write_text("not json\n{}\n")
    with pytest.raises(ArtefactError, match="Line 1"):
        write([tmp_path / "bad"], out)
    with pytest.raises(ArtefactError, match="at least one run"):
        write([], out)
    assert not out.exists()


@pytest.mark.parametrize(
    "text, said",
    [("{", "is not JSON"), ("", "is not JSON"), ("\x00", "is not JSON"), ("[" * 100_000, "is not JSON"),
     ("[]", "one JSON object"), ('{"dense": 3}', "`dense` is not an object"), ('{"schema": 2}', "schema 2")],
    ids=["half", "empty", "binary", "deep", "list", "number", "schema"],
)  # fmt: skip
def test_broken_receipts_are_refused(make_run: MakeRun, tmp_path: Path, text: str, said: str) -> None:
    run = make_run(epochs=1, polish=0)
    (run / "receipt.json").write_text(text)
    with pytest.raises(ArtefactError, match=re.escape(said)) as caught:
        write([run], tmp_path / "report.html")
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("blank")
def test_a_place_that_cannot_be_written(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(epochs=1, polish=0, every=20)
    (tmp_path / "file").write_text("here first")
    with pytest.raises(OutputError, match="cannot be written"):
        write([run], tmp_path / "file" / "report.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="it is a folder"):
        write([run], tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", run.name]
    if os.geteuid() != 0:  # root may write anywhere
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        with pytest.raises(OutputError, match="cannot be written"):
            write([run], locked / "report.html")
        assert list(locked.iterdir()) == []


@pytest.mark.parametrize("fails", ["write_bytes", "replace"])
@pytest.mark.usefixtures("blank")
def test_a_failure_half_way_leaves_what_was_there(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    run, out = make_run(epochs=1, polish=0, every=20), tmp_path / "new" / "report.html"
    calls = Counter[str]()

    def refuse(real: Any, after: int) -> Any:
        def call(*args: Any) -> Any:
            calls[fails] += 1
            if calls[fails] > after:
                raise OSError(28, "No space left on device")
            return real(*args)

        return call

    if fails == "write_bytes":
        monkeypatch.setattr(Path, "write_bytes", refuse(Path.write_bytes, 3))
    else:
        monkeypatch.setattr(os, "replace", refuse(os.replace, 0))
    with pytest.raises(OutputError, match="No space left on device"):
        write([run], out)
    assert not out.parent.exists()


@pytest.mark.usefixtures("blank")
def test_a_report_is_written_over_the_last_one(make_run: MakeRun, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")
    write([make_run(epochs=1, polish=0)], out)
    page_of(out)


def test_the_users_matplotlib_is_left_alone(make_run: MakeRun, tmp_path: Path) -> None:
    with matplotlib.rc_context({"svg.fonttype": "path", "text.usetex": True, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        page = report(make_run(epochs=2, polish=0))
        assert dict(matplotlib.rcParams) == before
    assert "each epoch" in page.text


@pytest.mark.usefixtures("blank")
def test_what_it_reads_and_imports(make_run: MakeRun) -> None:
    import prunus.report

    for source in Path(prunus.report.__file__).parent.glob("*.py"):
        text = source.read_text()
        for module in re.findall(r"^\s*(?:from|import) (prunus[\w.]*)", text, flags=re.M):
            assert module.startswith(("prunus.report", "prunus.errors")) or module == "prunus"
        assert re.findall(r"^from prunus import (.*)$", text, flags=re.M) in ([], ["record"])
        assert "pyplot" not in text
    run = make_run(epochs=1, polish=0)
    (run / "weights.bin").write_bytes(b"\x00")
    assert json.loads((run / "receipt.json").read_text())["schema"] == 1
    report(run)
