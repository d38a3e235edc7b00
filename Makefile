# Every target works from a bare checkout: it first sets up .venv with the exact versions in constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DOCUMENTED := .venv/.documented
ARVIZ1 := .venv-arviz1/bin

# Two workers share two cores. The compiled kernels keep two threads so that the tests see them run in parallel; idle threads must sleep, not spin,
# or each waits for the other's core. Memory in large pages, where the C library can: on virtual machines the first touch of small ones is what
# imports and collection wait for. Bytecode is kept, whatever the environment says: to compile the tests anew takes half of their collection.
WORKERS ?= 2
TEST_ENV := GLIBC_TUNABLES=glibc.malloc.hugetlb=1 PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=2 OMP_WAIT_POLICY=passive MPLBACKEND=Agg

.DEFAULT_GOAL := test
.PHONY: demo test nightly soak quick docs arviz1 lint format papers bench clean

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/natural_images.py --output report

test: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# What `make test` leaves out: processes, kills and damaged files, long training, and all variants of tests of which it runs some.
nightly: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m nightly

# One model after the other is trained, saved and taken up again: nothing may grow, fall or be left over.
soak: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m tests.faults.soak --minutes 90

# For the time between two edits: tests that are not slow, and of each at most two variants.
quick: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --variants 2 -m "not slow and not paper and not benchmark and not nightly"

# What meets ArviZ, with ArviZ 1.x: it cannot share an environment with 0.2x, which constraints.txt pins, and needs Python 3.12 or newer:
# make arviz1 PYTHON=python3.13
arviz1:
	test -x $(ARVIZ1)/python || $(PYTHON) -m venv .venv-arviz1
	grep -v '^arviz' constraints.txt > .venv-arviz1/constraints.txt
	$(ARVIZ1)/python -m pip install --quiet --constraint .venv-arviz1/constraints.txt torch
	$(ARVIZ1)/python -m pip install --quiet --constraint .venv-arviz1/constraints.txt --editable ".[test]" "arviz>=1"
	$(TEST_ENV) $(ARVIZ1)/python -m pytest -n $(WORKERS) --dist worksteal tests/diagnostics

$(DOCUMENTED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

# The site, in docs/_build/html: scripts are run, warnings are errors, and a browser opens every page where there is one (Chromium with its driver).
docs: $(DOCUMENTED)
	$(TEST_ENV) $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build/html
	$(BIN)/python docs/check_in_browser.py docs/_build/html

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tests/house.py
	$(BIN)/python tests/prose.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

papers: $(INSTALLED)
	$(BIN)/python -m pytest tests/papers -m paper

bench: $(INSTALLED)
	$(BIN)/python -m pytest tests/benchmarks -m benchmark -s

clean:
	rm -rf .venv .venv-arviz1 report build dist docs/_build docs/tutorials docs/comparison docs/reference/packages *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
