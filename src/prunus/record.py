"""A run's record: one JSON object a line, appended as the run goes on, and all that a report ever reads.

Every line has a `kind`. Costs are absolute numbers (parameters, MACs per example, bytes); `limit` is absolute too, and
`dense` beside it turns it into a fraction. `paper` is a fraction: the papers count the share of gates open.

=========  =============================================================================================================
kind       fields
=========  =============================================================================================================
start      schema, model, data, seed, device, epochs, steps_per_epoch, method, settings {...}, versions {...},
           dense {params, macs, bytes}, budgets [{what, where, limit, dense}], groups [{name, size, unit}]
step       step, epoch (float), loss, expected {params, macs, bytes},
           budgets [{expected, deployed, paper, multiplier}] in the order of `start`
epoch      epoch (1-based), step, phase ("train" or "polish"), loss, metric {name, value}, seconds,
           expected {params, macs, bytes}, deployed {params, macs, bytes}, budgets [as in step],
           kept {group: units}, open [counts of p_active in 20 equal bins from 0 to 1, all groups together]
landing    epoch, closed (gates), cost [{what, where, before, after}]
warning    message
end        seconds, receipt {...}
=========  =============================================================================================================
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from prunus.errors import ArtefactError, OutputError

SCHEMA = 1
KINDS = ("start", "step", "epoch", "landing", "warning", "end")


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null, as strict readers want."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


class Writer:
    """Append lines to a run's log; a line is written whole or not at all.

    `keep_bytes` drops what an interrupted run wrote after the checkpoint it resumes from.

    Raises:
        OutputError: the log cannot be written.
        ArtefactError: the log that is to be continued is gone, or ends before the checkpoint.
    """

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if keep_bytes and (not path.exists() or path.stat().st_size < keep_bytes):
                raise ArtefactError(
                    f"The log {path} is gone or was cut: its checkpoint continues {keep_bytes:,} bytes of it. Put it "
                    "back, or start anew without --resume."
                )
            self._file = open(path, "r+b" if keep_bytes else "wb")  # noqa: SIM115 (closed by `close`)
            self._file.truncate(keep_bytes or 0)
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise OutputError(f"The log {path} cannot be written: {error.strerror}.") from error

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line."""
        if kind not in KINDS:
            raise AssertionError(f"no such kind of line: {kind}")
        line = json.dumps(_plain({"kind": kind, **fields}), separators=(",", ":"), allow_nan=False)
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"The log {self.path} cannot be written: {error.strerror}.") from error

    def tell(self) -> int:
        """How many bytes the log holds, to be kept in a checkpoint."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:  # what could not be written is in the buffer still
            raise OutputError(f"The log {self.path} cannot be written: {error.strerror}.") from error

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Read a log; a half-written last line (a run that was killed) is left out.

    Raises:
        ArtefactError: the file is missing, or a line inside it is not a record.
    """
    return list(_lines(path))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ArtefactError(f"There is no run log at {path}: {error.strerror}.") from error
    lines = text.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
            if record["kind"] not in KINDS:
                raise KeyError(record["kind"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines):  # no newline behind it: the writer was killed in mid-line
                return
            raise ArtefactError(f"Line {number} of {path} is not a line of a run log.") from error
        yield record
