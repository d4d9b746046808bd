"""README says what works: its example runs as it stands, its commands exist, its files too."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_meets_its_budget(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"(\d+) -> (\d+) max rel. difference (\S+)", done.stdout)
    assert found, done.stdout
    assert int(found[2]) <= 0.25 * int(found[1])
    assert float(found[3]) <= 1e-5
    assert (tmp_path / "small.safetensors").exists()


def test_the_make_targets_and_files_it_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`?make (\w+)`?", README))
    assert {"demo", "test", "lint"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets & {"demo", "test", "lint", "slow"})
    for name in re.findall(r"`((?:src|docs)/[\w/.]+)`", README):
        assert (ROOT / name).exists(), name


def test_ci_calls_what_readme_names():
    ci = (ROOT / ".ci" / "run").read_text()
    assert "make test" in ci
    assert "make lint" in ci
