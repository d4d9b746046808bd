"""Downloads from the first public mirror that has the right bytes, going on where an interrupted one stopped."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import rich.progress
from rich.console import Console

from prunus.errors import DataError

CONNECT_SECONDS = 3.0
STALL_SECONDS = 15.0
TRIES = 3
_CHUNK = 1 << 13  # small: of a chunk in which the connection breaks, nothing is kept


class Failed(Exception):
    """One way to the data did not work; its text says why, and ends up in the error when no other way does."""


class Mirrors:
    """Mirrors of one set of files, asked in order; one that fails is not asked again.

    Use it as a context manager: it owns the progress bar, which shows speed and time left on a terminal only.
    """

    def __init__(self, title: str, urls: Sequence[str]) -> None:
        self.title = title
        self.urls = list(urls)
        self.failures: list[tuple[str, str]] = []
        self._probed = False
        self._bar = _bar(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def download(self, name: str, folder: Path, check: Callable[[Path], object]) -> bool:
        """Bring the file `name` into `folder`, under that name only once `check` has not raised DataError.

        Returns:
            Whether it is there now; `failures` says why each mirror that did not work did not.
        """
        if not self._probed:
            self._probe()
        while self.urls:
            url = self.urls[0]
            try:
                _retrieve(url.rstrip("/") + "/" + name, name, folder, self._fetcher(name, check))
                return True
            except Failed as error:
                self._drop(url, str(error))
        return False

    def _drop(self, url: str, why: str) -> None:
        self.urls.remove(url)
        self.failures.append((urlsplit(url).hostname or url, why))

    def _probe(self) -> None:
        """Drop the mirrors that cannot be reached, waiting for all of them at once and a few seconds only.

        In threads, since a lookup of a name on a network that drops packets knows no time limit of ours.
        """
        import requests

        self._probed = True
        answers: dict[str, str | None] = {}

        def ask(url: str) -> None:
            try:
                requests.head(url, timeout=CONNECT_SECONDS, allow_redirects=False).close()
                answers[url] = None
            except requests.RequestException as error:
                answers[url] = _why(error)

        threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in self.urls]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + CONNECT_SECONDS + 1
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for url in list(self.urls):
            why = answers.get(url, f"no answer in {CONNECT_SECONDS:.0f} s")
            if why is not None:
                self._drop(url, why)

    def _fetcher(self, name: str, check: Callable[[Path], object]) -> Callable[[str, str, Any], None]:
        """Make the downloader that pooch calls with an address, a temporary file to fill, and itself."""

        def fetch(url: str, output: str, _: Any) -> None:
            # A part belongs to its address: another mirror may have packed the same content into other bytes.
            mark = hashlib.sha256(url.encode()).hexdigest()[:8]
            part = Path(output).parent / f"{name}.{mark}.part"
            resumed = part.exists()
            self._complete(url, part, name)
            try:
                check(part)
            except DataError as error:
                part.unlink()
                if not resumed:
                    raise Failed(f"it sent something else: {_within(error, part, name)}") from error
                # What an earlier run left may be what is wrong: once more from the first byte.
                fetch(url, output, _)
                return
            os.replace(part, output)

        return fetch

    def _complete(self, url: str, part: Path, name: str) -> None:
        """Fill `part` to the end; a connection that breaks is taken up again where it broke."""
        import requests

        task = self._bar.add_task(f"{self.title} {name}", total=None)
        try:
            for attempt in range(TRIES):
                before = part.stat().st_size if part.exists() else 0
                try:
                    self._stream(url, part, task)
                    return
                except requests.RequestException as error:
                    held = part.stat().st_size if part.exists() else 0
                    # Worth another try only where bytes came: a refusal will be one again.
                    if attempt == TRIES - 1 or held <= before:
                        raise Failed(_why(error)) from error
        finally:
            self._bar.remove_task(task)

    def _stream(self, url: str, part: Path, task: rich.progress.TaskID) -> None:
        import requests

        held = part.stat().st_size if part.exists() else 0
        # "identity": a file that is gzip already must arrive as it is, and a range must count its bytes.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={held}-"} if held else {})
        with requests.get(url, headers=headers, stream=True, timeout=(CONNECT_SECONDS, STALL_SECONDS)) as response:
            if response.status_code == 416:
                return  # nothing after the part: it is whole, or `check` finds it is not
            if response.status_code not in (200, 206):
                raise Failed(f"it answered {response.status_code} {response.reason}")
            going_on = response.status_code == 206
            if going_on and not response.headers.get("Content-Range", "").startswith(f"bytes {held}-"):
                part.unlink()
                raise Failed("it sent another range of the file than was asked for")
            start = held if going_on else 0
            length = response.headers.get("Content-Length", "")
            self._bar.update(task, total=start + int(length) if length.isdigit() else None, completed=start)
            with part.open("ab" if going_on else "wb") as file:
                for chunk in response.iter_content(_CHUNK):
                    file.write(chunk)
                    self._bar.advance(task, len(chunk))


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show on a terminal that something of unknown length is under way."""
    bar = _bar(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    with bar:
        bar.add_task(text, total=None)
        yield


class _Progress(rich.progress.Progress):
    def stop(self) -> None:
        # Rich ends even a bar that was never shown with an empty line.
        if not self.disable:
            super().stop()


def _bar(*columns: rich.progress.ProgressColumn) -> rich.progress.Progress:
    # On stderr, since stdout is for results; on a terminal only, since in a log file a bar is noise.
    console = Console(stderr=True)
    return _Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _retrieve(url: str, name: str, folder: Path, downloader: Callable[[str, str, Any], None]) -> None:
    """Let pooch download into a temporary file and rename it."""
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    # Without a hash of the packed bytes, pooch tells the user to copy one; `check` has already seen to the content.
    logger.setLevel(logging.WARNING)
    try:
        pooch.retrieve(url, known_hash=None, fname=name, path=folder, downloader=downloader)
    finally:
        logger.setLevel(level)


def _why(error: Exception) -> str:
    """Say in few words why a connection failed; what `requests` says runs over several lines."""
    import requests

    text = str(error)
    if isinstance(error, requests.Timeout):
        return f"no answer in {CONNECT_SECONDS:.0f} s" if "onnect" in text else f"it stalled for {STALL_SECONDS:.0f} s"
    for sign, meaning in (
        ("Read timed out", f"it stalled for {STALL_SECONDS:.0f} s"),
        ("resolve", "its name cannot be looked up"),
        ("name resolution", "its name cannot be looked up"),
        ("refused", "it refused the connection"),
        ("unreachable", "the network is unreachable"),
        ("IncompleteRead", "it broke off in the middle of the file"),
        ("reset", "it broke off the connection"),
        ("aborted", "it broke off the connection"),
        ("CERTIFICATE", "its certificate cannot be trusted"),
    ):
        if sign in text:
            return meaning
    return f"the connection failed ({type(error).__name__})"


def _within(error: DataError, part: Path, name: str) -> str:
    return str(error).replace(str(part), name).rstrip(".")
