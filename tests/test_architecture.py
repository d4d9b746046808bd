"""Imports point one way: a file imports only from lower layers, or downward inside its own package."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "prunus"

# Layer by layer, lowest first. Siblings in a layer do not import each other, except in the order listed.
LAYERS = [
    ["errors"],
    ["scatter", "terms"],
    ["axes", "record", "files", "measure", "models", "moments", "extrapolation"],
    ["rows", "graph", "gates", "data", "sealed"],
    ["cost", "openness", "rounds"],
    ["gated", "surgery"],
    ["budget"],
    ["landing", "methods", "receipt"],
    ["front"],
    ["train", "bench"],
    ["report"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports() -> list[tuple[str, str]]:
    """Every import of one part of Prunus by another: (importing part, imported part)."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [
                    f"{node.module}.{alias.name}" if node.module == "prunus" else node.module for alias in node.names
                ]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                pieces = name.split(".")
                if pieces[0] == "prunus" and len(pieces) > 1:
                    found.append((part, pieces[1]))
    return found


def test_every_part_has_a_layer():
    parts = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert parts == set(LEVEL)


def test_imports_point_down():
    every = imports()
    assert len(every) > 100  # the walk finds what there is
    wrong = {(a, b) for a, b in every if b in LEVEL and a != b and LEVEL[b] >= LEVEL[a]}
    assert not wrong


def test_surgery_knows_no_gates_and_reports_read_only_records():
    by_part: dict[str, set[str]] = {}
    for importing, imported in imports():
        by_part.setdefault(importing, set()).add(imported)
    assert not by_part["surgery"] & {"gates", "gated", "budget", "methods"}
    assert by_part["report"] - {"report"} <= {"record", "errors"}


def export_names(path: Path) -> set[str]:
    """What a file's code takes of `torch.export`; what its sentences say of it does not count."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.export"):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("torch.export")}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.export":
            found.add(node.attr)
    return found


def test_only_trace_touches_torch_export():
    used = {path.name: names for path in SOURCE.rglob("*.py") if (names := export_names(path))}
    assert list(used) == ["trace.py"]
    assert "export" in used["trace.py"]


def test_files_stay_readable_whole():
    long = {path.name: count for path in SOURCE.rglob("*.py") if (count := len(path.read_text().splitlines())) > 400}
    assert not long
