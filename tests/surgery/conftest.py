"""The models of the graph tests serve here too; one thread is quickest for models this small."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

collect_ignore = ["conftest.py"]  # --doctest-modules would import every conftest under one name
sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
