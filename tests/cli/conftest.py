"""Folders to run commands in."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli_shell import SHORT, Said, call, inside


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """These networks are too small to share; subprocesses train on as many threads as this one, bit for bit."""
    before, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    torch.set_num_threads(before)
    if variable is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = variable


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    with inside(tmp_path):
        yield tmp_path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """A short run on digits, with its dense twin, that nobody may change."""
    with inside(tmp_path_factory.mktemp("finished")) as folder:
        said = call(*SHORT, "--baseline", "--out", folder / "run")
    return folder / "run", said
