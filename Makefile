# `make demo` and `make test` do everything on a machine that has Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Two workers of one thread each beat one worker of two threads on these small models.
JOBS   ?= 2
CONSTRAINTS ?= constraints.txt
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: demo test oldest check lint types wheel clean

demo: $(VENV)/.installed
	$(BIN)/farspan demo

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

# The same laws on the oldest transformers that farspan supports.
oldest:
	mkdir -p .venv-oldest
	sed 's/^transformers==.*/transformers==5.17.0/' constraints.txt > .venv-oldest/constraints.txt
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=.venv-oldest/constraints.txt

check: $(VENV)/.installed-dev lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) .venv-oldest dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch goes first: chosen alone, pip takes the build that the constraint names and no other.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "farspan needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[test]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@
