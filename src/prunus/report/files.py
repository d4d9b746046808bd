"""Writing a report: everything is made in memory, written under temporary names, and only then named.

A reader therefore never meets half a page, and a report that cannot be written leaves what was there before.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from prunus.errors import ArtefactError, OutputError
from prunus.report import page, plots, runs


def write(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of one run, or of several side by side, to `out` and its plots to `plots/` beside it.

    The page is complete in itself; the plots (as SVG and PNG) are for slides and papers. Those of a single run are
    called `dynamics`, `units`, `gates` and `cost`; those of several have the run's name in front, and `compared`.

    Returns:
        The path of the page.

    Raises:
        ArtefactError: there is no run, or its log or receipt is missing or broken.
        OutputError: the page or a plot cannot be written.
    """
    if not folders:
        raise ArtefactError("There is no run to report on: name at least one run folder.")
    folders, out = [Path(folder) for folder in folders], Path(out)
    loaded = runs.load(folders)
    if len(loaded) == 1:
        drawn = plots.of_run(loaded[0])
        text = page.single(loaded[0], drawn)
    else:
        prefixes = [f"{i}-{_slug(run.name)}-" for i, run in enumerate(loaded, 1)]
        each = [plots.of_run(run, prefix) for run, prefix in zip(loaded, prefixes, strict=True)]
        together = plots.compared(loaded)
        text = page.several(loaded, together, each)
        drawn = [together, *(plot for own in each for plot in own)]
    contents = {out.parent / "plots" / f"{plot.name}.svg": plot.svg.encode() for plot in drawn}
    contents |= {out.parent / "plots" / f"{plot.name}.png": plot.png for plot in drawn}
    contents[out] = text.encode()  # last: when the page appears, its plots are there
    _write_all(contents)
    return out


def _slug(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9._]+", "-", name)[:40].strip("-.") or "run"


def _write_all(contents: dict[Path, bytes]) -> None:
    """Write every file, or none."""
    made: list[Path] = []
    temporary: dict[Path, Path] = {}
    target = next(iter(contents))
    try:
        for target, data in contents.items():
            if target.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            made += _make(target.parent)
            temporary[target] = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            temporary[target].write_bytes(data)
        for target, written in temporary.items():
            os.replace(written, target)
    except OSError as error:
        for written in temporary.values():
            written.unlink(missing_ok=True)
        for folder in reversed(made):
            if not any(folder.iterdir()):
                folder.rmdir()
        raise OutputError(f"The report cannot be written to {target}: {error.strerror or error}.") from error


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it; answer which were new, outermost first."""
    new = [path for path in reversed([folder, *folder.parents]) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return new
