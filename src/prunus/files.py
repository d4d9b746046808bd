"""Writing files so that nothing half-written is left behind: under a temporary name, then renamed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prunus.errors import ArtefactError, OutputError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`, renamed to it if all goes well and removed if not.

    Raises:
        OutputError: the folder is read-only, the disk is full, or the like.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):  # where nothing can be written, nothing was left
            temporary.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people and programs alike."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path, what: str) -> Any:
    """Read JSON; `what` says in the error what the file should have been."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ArtefactError(f"There is no {what} at {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path} is not a {what}: it does not hold JSON.") from error


def writable_folder(path: Path) -> None:
    """Make a folder and see that files can be written in it, before anybody works for hours."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe.{os.getpid()}"
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        raise OutputError(f"The output folder {path} cannot be written: {error.strerror or error}.") from error
