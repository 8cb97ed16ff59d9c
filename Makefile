# Needs Python 3.11 or later, with pip. Everything is installed into .venv, at the versions of constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable
SOURCES := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-triton36 lint format bench bench-gpu clean

help:
	@echo "make demo    train a small GPT on real English text (options: make demo ARGS='--steps 100')"
	@echo "make test    run the tests (options: make test ARGS='-k state')"
	@echo "make test-triton36  run the tests of the Triton kernels with Triton 3.6.0, in .venv-triton36"
	@echo "make lint    ruff check, ruff format --check, mypy --strict"
	@echo "make format  let ruff rewrite what it can"
	@echo "make bench   time compiled functions against torch.compile and eager"
	@echo "make bench-gpu  check and time the FP8 kernels on a GPU"
	@echo "make clean   remove build products and caches (.venv* and runs stay)"

demo: .venv/.installed
	$(BIN)/scoped-fn train $(ARGS)

test: .venv/.installed-test
	$(BIN)/python -m pytest $(ARGS)

# The oldest Triton that the library accepts: all other pins as everywhere.
test-triton36: .venv-triton36/.installed-test
	.venv-triton36/bin/python -m pytest tests/kernels/test_processes.py $(ARGS)

lint: .venv/.installed-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict

format: .venv/.installed-lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: .venv/.installed-test
	$(BIN)/python -m tests.bench $(ARGS)

bench-gpu: .venv/.installed-test
	$(BIN)/python -m tests.bench.gpu

clean:
	rm -rf build dist scoped_fn.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find scoped_fn state kernels interop tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: a repeated call installs nothing, a changed pin or dependency installs again.
.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	    f"Expected Python 3.11 or later, got {sys.version.split()[0]}. Say which to use: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv-triton36/.installed-test: .venv/.created $(SOURCES)
	$(PYTHON) -m venv .venv-triton36
	sed 's/^triton==.*/triton==3.6.0/' constraints.txt > .venv-triton36/constraints.txt
	.venv-triton36/bin/python -m pip install --quiet --constraint .venv-triton36/constraints.txt --editable '.[test]'
	@touch $@

.venv/.installed: .venv/.created $(SOURCES)
	$(INSTALL) .
	@touch $@

.venv/.installed-test: .venv/.created $(SOURCES)
	$(INSTALL) '.[test]'
	@touch $@

# With jax: mypy reads what interop imports.
.venv/.installed-lint: .venv/.created $(SOURCES)
	$(INSTALL) '.[lint,jax]'
	@touch $@
