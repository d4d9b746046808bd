# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Only Python 3.11+ and make are assumed; the environment lives in .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint slow clean

demo: .venv/.installed
	$(BIN)/prunus train --out runs/demo

test: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

slow: .venv/.installed
	$(BIN)/python -m pytest -m slow

lint: .venv/.installed
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/mypy

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Prunus needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs build src/*.egg-info
