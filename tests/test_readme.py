"""README says what works: its example runs as it stands, its commands exist, its files too."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_meets_its_budget(tmp_path):
    """Its blocks, one behind the other, are a script; it prints what README says, but for what the machine decides."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    assert len([line for line in blocks[1].splitlines() if line]) <= 14  # the ten lines of Prunus, and the loop's
    extra = (
        'print(receipt)\nprunus.save(small, "small.safetensors")\nloaded = prunus.load(Net(), "small.safetensors")\n'
        "assert torch.equal(loaded.eval()(x), small.eval()(x))\n"
    )
    (tmp_path / "example.py").write_text("\n".join(blocks) + extra)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    pattern = r"(\d+) -> (\d+) parameters"
    said, shown = re.search(pattern, done.stdout), re.search(pattern, README)
    assert said, done.stdout
    assert shown
    assert said[1] == shown[1]
    for found in (said, shown):
        assert 0.1 * int(found[1]) < int(found[2]) <= 0.25 * int(found[1])
    assert done.stdout.count(", met") == 2
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
