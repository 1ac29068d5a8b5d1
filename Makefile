# `make demo` and `make test` work on any machine with Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# One single-threaded worker for each core: on small models that beats one worker with many threads.
JOBS   ?= $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)))')
CONSTRAINTS ?= constraints.txt
PIP    := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c $(CONSTRAINTS)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# Of 20,000 installed files, the first import of a module compiles it, and writes what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test coverage long mutants families torture torture-full oldest check lint \
	types dev figures docs wheel clean

demo: $(VENV)/.installed
	$(BIN)/farspan demo

# With MARKERS="not manual" it includes the long tests: one session starts its workers once.
test: $(VENV)/.installed
	$(PYTEST) $(if $(MARKERS),-m "$(MARKERS)")

# The lines of src/farspan that all tests reach; takes more than twice as long. Tracing also slows
# the commands that tests start, so the one that limits the time of `farspan --help` is left out.
coverage: $(VENV)/.installed-dev
	$(PYTEST) -m "not manual" --cov --cov-report=term:skip-covered \
		--deselect tests/test_architecture.py::test_help_is_quick

# The tests that take seconds or minutes. Files without one are not imported.
long: $(VENV)/.installed
	$(PYTEST) -m "long and not manual" $$(grep -l mark.long tests/test_*.py)

# Does a test notice when one operator or number of the code changes? Rerun to resume.
mutants: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants.py

# Check every causal family of the installed transformers, and write docs/families.md. Rerun to
# resume.
families: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/sweep.py

# Kills, I/O faults, corrupt and hostile files, fuzzing, many processes: a sample that is sized for
# ten minutes on two cores.
# Rerun to resume.
TORTURE := OMP_NUM_THREADS=1 PYTHONPATH=src:tests $(BIN)/python -m torture
torture: $(VENV)/.installed
	$(TORTURE)

# The same with the counts of docs/security.md.
torture-full: $(VENV)/.installed
	$(TORTURE) --full

# The same tests on the oldest transformers that farspan supports.
oldest:
	mkdir -p .venv-oldest
	sed 's/^transformers==.*/transformers==5.17.0/' constraints.txt > .venv-oldest/constraints.txt
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=.venv-oldest/constraints.txt

check: lint types test

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

dev: $(VENV)/.installed-dev
	$(BIN)/pre-commit install

# The figures and tables of the documentation that have records, drawn again.
figures: $(VENV)/.installed
	$(BIN)/python benchmarks/draw_figures.py
	$(BIN)/python benchmarks/draw_tables.py

# The documentation as a site, in site/; a warning is an error.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) .venv-oldest dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.coverage*

# torch first: when it is installed by itself, pip takes the build that the constraint names.
$(VENV)/.created: $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "farspan needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(PIP) -e '.[test]'
	touch $@

# All of it at once, as CI does: pip resolves the extras one time instead of three.
install: $(VENV)/.created pyproject.toml
	$(PIP) -e '.[dev,docs]'
	touch $(VENV)/.installed $(VENV)/.installed-docs $(VENV)/.installed-dev

$(VENV)/.installed-docs: $(VENV)/.created pyproject.toml
	$(PIP) -e '.[docs]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@
