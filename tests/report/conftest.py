"""Fixtures of the report's tests; the runs themselves are made in `report_fakes`."""

from pathlib import Path
from typing import Any

import pytest
from report_fakes import MakeRun, fake_lines, put


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str = "lenet-10", **options: Any) -> Path:
        lines, receipt = fake_lines(**options)
        return put(tmp_path / name, lines, receipt if options.get("finished", True) else None)

    return make
