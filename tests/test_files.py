"""Nothing half-written: what is left in a folder when writing goes well, and when it does not."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from prunus.errors import ArtefactError, OutputError
from prunus.files import read_json, replacing, writable_folder, write_json


def listing(folder: Path) -> list[str]:
    """Everything below a folder, hidden or not."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


# ---- replacing -------------------------------------------------------------------------------------------------------


def test_a_file_comes_whole_under_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.txt"
    with replacing(path) as temporary:
        assert temporary.parent == path.parent  # a rename stays inside one file system
        assert temporary != path
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert listing(tmp_path) == ["deep", "deep/er", "deep/er/a.txt"]


def test_an_old_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new and longer")
        assert path.read_text() == "old"
    assert path.read_text() == "new and longer"
    assert listing(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_whatever_goes_wrong_the_old_file_stays_and_nothing_else_is_left(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    expected = OutputError if isinstance(error, OSError) else type(error)

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(expected) as caught:
        fail()
    assert path.read_text() == "old"
    assert listing(tmp_path) == ["a.txt"]
    if expected is OutputError:
        assert str(caught.value) == f"{path} cannot be written: No space left."
        assert caught.value.__cause__ is error


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_at_the_end_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutputError, match=r"a\.txt cannot be written: No space left on device\."):
        write_json(path, {"a": 1})
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert listing(tmp_path) == ["a.txt"]


def test_what_was_written_reaches_the_disk_before_the_old_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), replace(a, b)))
    write_json(tmp_path / "a.json", 1)
    assert done == ["fsync", "replace"]


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(OutputError, match=r"taken/a\.txt cannot be written: "):
        write_json(tmp_path / "taken" / "a.txt", 1)
    with pytest.raises(OutputError, match=r"taken/deep/a\.txt cannot be written: "):
        write_json(tmp_path / "taken" / "deep" / "a.txt", 1)
    assert (tmp_path / "taken").read_text() == "mine"
    assert listing(tmp_path) == ["taken"]


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json" / "inside").mkdir(parents=True)
    with pytest.raises(OutputError, match=r"a\.json cannot be written: "):
        write_json(tmp_path / "a.json", 1)
    assert listing(tmp_path) == ["a.json", "a.json/inside"]


def test_a_read_only_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By permission where permissions bind; root may write everywhere, so there the system's answer is put in."""
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):

        def refuse(file: Any, *_: Any, **__: Any) -> Any:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))

        monkeypatch.setattr(io, "open", refuse)
    with pytest.raises(OutputError, match=r"a\.json cannot be written: Permission denied\."):
        write_json(folder / "a.json", 1)
    with pytest.raises(OutputError, match=r"The output folder .*locked cannot be written: Permission denied\."):
        writable_folder(folder)
    monkeypatch.undo()
    folder.chmod(0o700)
    assert listing(tmp_path) == ["locked"]


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_a_writable_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    writable_folder(tmp_path / "a" / "b")
    writable_folder(tmp_path / "a" / "b")
    assert listing(tmp_path) == ["a", "a/b"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "deeper"):
        with pytest.raises(OutputError, match=r"The output folder .*taken.* cannot be written: "):
            writable_folder(folder)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_full_disk_is_noticed_before_anybody_works_for_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        writable_folder(tmp_path / "a")


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, "ä"], "b": {}}, [], 3, None, "x"])
def test_json_comes_back(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "a.json"
    write_json(path, value)
    assert read_json(path, "thing") == value
    assert json.loads(path.read_bytes()) == value
    assert path.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}, {1, 2}, object()])
def test_what_is_no_json_is_not_written(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text("1")
    with pytest.raises((ValueError, TypeError)):
        write_json(path, value)
    assert path.read_text() == "1"
    assert listing(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe\x00", b"[" * 200_000, b"{'a': 1}", b"1 2", b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_what_holds_no_json_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match=r"a\.json is not a receipt: it does not hold JSON\."):
        read_json(path, "receipt")


def test_json_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"There is no receipt at .*a\.json: No such file or directory\."):
        read_json(tmp_path / "a.json", "receipt")
    with pytest.raises(ArtefactError, match=r"There is no receipt at .*: Is a directory\."):
        read_json(tmp_path, "receipt")
