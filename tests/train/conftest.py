"""One thread, and short measurements: these networks are too small to share, and their latency matters to no test."""

import functools
import importlib
from collections.abc import Iterator

import pytest
import torch

from prunus.front import shrink


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def short_measurements() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("prunus.train.fit"), "shrink", functools.partial(shrink, seconds=1e-3))
        yield
