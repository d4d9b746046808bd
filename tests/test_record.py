"""A run's record: whole lines in, whole lines out, and nothing believed that is damaged."""

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunus.errors import ArtefactError, OutputError
from prunus.record import KINDS, Writer, read


def written(path: Path, count: int = 3) -> list[dict[str, Any]]:
    """A log of a few lines; returns what must be read back."""
    lines = [{"kind": "step", "step": k, "loss": 0.5 * k} for k in range(count)]
    with Writer(path) as log:
        for line in lines:
            log.write(**line)
    return lines


class Brittle:
    """A file that fails in one of its methods."""

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> None:
            if name == self.broken:
                raise OSError(errno.ENOSPC, "No space left on device")

        return call


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one" / "log.jsonl"
    with Writer(path) as log:
        for kind in KINDS:
            log.write(kind, text='ä "quoted"\nbroken\r\u2028 line', deep={"a": [1, (2.5, None)], 3: True})
    lines = read(path)
    assert [line["kind"] for line in lines] == list(KINDS)
    assert lines[0]["text"] == 'ä "quoted"\nbroken\r\u2028 line'
    assert lines[0]["deep"] == {"a": [1, [2.5, None]], "3": True}
    assert path.read_bytes().count(b"\n") == len(KINDS)


def test_every_line_is_on_the_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Writer(path)
    assert log.tell() == 0
    for k in range(3):
        log.write("step", step=k)
        assert [line["step"] for line in read(path)] == list(range(k + 1))
        assert log.tell() == path.stat().st_size
    log.close()


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Writer(path) as log:
        log.write("step", loss=math.nan, up=[math.inf, {"deep": (-math.inf, 1.0)}], fine=1e308)
    (line,) = read(path)
    assert line == {"kind": "step", "loss": None, "up": [None, {"deep": [None, 1.0]}], "fine": 1e308}
    assert b"NaN" not in path.read_bytes()
    assert b"Infinity" not in path.read_bytes()


def test_an_unknown_kind_is_our_own_mistake(tmp_path: Path) -> None:
    with Writer(tmp_path / "log.jsonl") as log, pytest.raises(AssertionError, match="no such kind of line: stp"):
        log.write("stp")
    assert read(tmp_path / "log.jsonl") == []


def test_a_new_run_starts_an_empty_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    written(path)
    for keep in (None, 0):
        Writer(path, keep).close()
        assert path.read_bytes() == b""
        written(path)


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [b"", b'{"kind":"step","st', b'{"kind":"step","step":9}\n', b"\0" * 500])
def test_what_was_written_after_the_checkpoint_is_dropped(tmp_path: Path, extra: bytes) -> None:
    path = tmp_path / "log.jsonl"
    lines = written(path)
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(extra)
    with Writer(path, keep_bytes=size) as log:
        assert log.tell() == size
        log.write("epoch", epoch=1)
    assert read(path) == [*lines, {"kind": "epoch", "epoch": 1}]


def test_resuming_at_every_line_gives_the_bytes_of_the_uninterrupted_run(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    ends = [0]
    with Writer(whole) as log:
        for k in range(4):
            log.write("step", step=k, loss=k / 3)
            ends.append(log.tell())
    for done in range(1, 4):
        cut.write_bytes(whole.read_bytes()[: ends[done] + 7])
        with Writer(cut, keep_bytes=ends[done]) as log:
            for k in range(done, 4):
                log.write("step", step=k, loss=k / 3)
        assert cut.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("what", ["gone", "short"])
def test_a_log_that_is_gone_or_too_short_is_not_continued(tmp_path: Path, what: str) -> None:
    path = tmp_path / "log.jsonl"
    written(path)
    size = path.stat().st_size
    if what == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtefactError, match=rf"log\.jsonl is gone or was cut: its checkpoint continues {size:,} bytes"):
        Writer(path, keep_bytes=size)
    assert path.exists() == (what == "short")
    if what == "short":
        assert path.stat().st_size == size - 1


# ---- what cannot be written ------------------------------------------------------------------------------------------


def test_a_log_in_an_impossible_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(OutputError, match=r"The log .*taken/log\.jsonl cannot be written: "):
        Writer(tmp_path / "taken" / "log.jsonl")
    with pytest.raises(OutputError, match=r"The log .* cannot be written: Is a directory\."):
        Writer(tmp_path)


@pytest.mark.parametrize("broken", ["write", "flush", "close"])
def test_a_full_disk_is_said_in_one_sentence(tmp_path: Path, broken: str) -> None:
    log = Writer(tmp_path / "log.jsonl")
    log._file.close()
    log._file = Brittle(broken)  # type: ignore[assignment]

    def use() -> None:
        log.write("step", step=1)
        log.close()

    with pytest.raises(OutputError, match=r"The log .*log\.jsonl cannot be written: No space left on device\."):
        use()


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    """The file cut at every byte: never an error, and exactly the lines that are whole."""
    path = tmp_path / "log.jsonl"
    lines = written(path)
    raw = path.read_bytes()
    ends = [k for k, byte in enumerate(raw) if byte == ord("\n")]
    for size in range(len(raw) + 1):
        path.write_bytes(raw[:size])
        assert read(path) == lines[: sum(end <= size for end in ends)]


@pytest.mark.parametrize(
    "bad",
    [b"{", b"17", b"null", b"[]", b'"kind"', b"{}", b'{"kind":"stp"}', b'{"kind":["step"]}', b"\xff", b"[" * 200_000],
)
def test_a_damaged_line_in_the_middle_is_named_and_at_the_end_left_out(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "log.jsonl"
    lines = written(path)
    raw = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(raw[0] + bad + b"\n" + raw[2])
    with pytest.raises(ArtefactError, match=r"Line 2 of .*log\.jsonl is not a line of a run log\."):
        read(path)
    path.write_bytes(b"".join(raw) + bad + b"\n")  # whole, and yet no record
    with pytest.raises(ArtefactError, match=r"Line 4 of .*log\.jsonl is not a line of a run log\."):
        read(path)
    path.write_bytes(b"".join(raw) + bad)
    assert read(path) == lines


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"There is no run log at .*log\.jsonl: No such file or directory\."):
        read(tmp_path / "log.jsonl")
    with pytest.raises(ArtefactError, match=r"There is no run log at .*: Is a directory\."):
        read(tmp_path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def strict(value: Any) -> Any:
    """A second reading of what a line may hold: through Python's own JSON with its NaN, then null for it."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


@given(st.lists(st.dictionaries(st.text("abcxyz_ä", min_size=1, max_size=4), VALUES, max_size=3), max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_fields_come_back_with_null_for_what_is_no_number(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    with Writer(path) as log:
        for fields in lines:
            log.write("warning", **fields)
    assert read(path) == [strict({"kind": "warning", **fields}) for fields in lines]
