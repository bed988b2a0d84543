# Needs only Python 3.11+ and pip: the first target creates a virtual environment in .venv and installs
# kedge there.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Flower needs older releases of typer, rich, starlette and protobuf: an environment of its own.
FLOWER       := .venv-flower
FLOWER_STAMP := $(FLOWER)/.installed

.PHONY: install demo test long flower check format clean results mutants docs dist

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

$(FLOWER_STAMP): pyproject.toml constraints-flower.txt
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-flower.txt "torch==2.13.0"
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-flower.txt -e ".[test,flower]"
	@touch $(FLOWER_STAMP)

demo: $(STAMP)
	$(BIN)/kedge demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not long and not flower"

# What CI runs after the tests: pairs of parts, faults that oracles must find, real networks, examples, pages in a browser.
long: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long

# What CI runs last: federations of real processes of Flower, and what uses the older releases.
flower: $(FLOWER_STAMP)
	OMP_NUM_THREADS=1 $(FLOWER)/bin/python -m pytest -n 2 --dist loadfile -m flower tests/flower/real
	OMP_NUM_THREADS=1 $(FLOWER)/bin/python -m pytest -n 2 --dist worksteal -m "not long and not flower" \
		tests/flower tests/cli tests/board

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

# Build wheel and sdist into dist, check their content, and try the wheel in an environment of its
# own. ARGS, for instance: "--demo", "--no-trial", "--python python3.13".
dist: $(STAMP)
	$(BIN)/python -m tools.release $(ARGS)

# How many small faults the tests notice: up to an hour on two cores. ARGS, for instance:
# "--survivors" (only those of the last run), "--jobs 14 --cap 60", "--files src/kedge/parts/drift.py".
mutants: $(STAMP)
	$(BIN)/python -m tools.mutants $(ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(FLOWER) .pytest_cache .mypy_cache .ruff_cache dist .mutants site .site

# Write docs/results.md, its figures and docs/learn/choosing.md from the records in docs/results.
results: $(STAMP)
	$(BIN)/python -m tools.results

# Build the documentation site in the folder site: open site/index.html, or `python -m http.server -d site`.
docs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tools.site $(ARGS)
