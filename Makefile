# Every target builds the environment it needs: python3 with venv, make and git are enough to start.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
REQUIREMENTS := requirements/torch.txt requirements/cpu.txt requirements/no-deps.txt requirements/sglang-0.5.23.txt pyproject.toml experiments/cpu_host/pyproject.toml
# Where torch brings no Triton: the release that SGLang 0.5.16 comes with.
TRITON := triton>=3.6,<3.7
PYTEST := $(BIN)/python -m pytest
# pip draws its progress on a terminal and says nothing in a log.
PIP := $(BIN)/python -m pip install $(shell [ -t 2 ] || echo -qq)
# Two workers share the machine: one thread each.
PAIR := OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.NOTPARALLEL:
# One failing group of tests hides no other.
MAKEFLAGS += --keep-going
.PHONY: help demo test test-cpu test-compile test-sglang check lint types layers format env clean

help:  ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP)  ## Serve a real model on the CPU, dense and sparse, and compare (table and picture)
	$(BIN)/python experiments/demo.py

test: test-cpu test-compile test-sglang  ## Run every test that needs no GPU

test-cpu: $(STAMP)  ## Language, flows and kernels, in Triton's interpreter
	$(PAIR) TRITON_INTERPRET=1 $(PYTEST) tests/cpu -n 2

test-compile: $(STAMP)  ## Compile every flow's kernels for GPUs, without one
	$(PAIR) env -u TRITON_INTERPRET $(PYTEST) tests/compile -n 2

test-sglang: $(STAMP)  ## The plugin inside stock SGLang 0.5.16 and 0.5.23, on the CPU
	$(PAIR) env -u TRITON_INTERPRET $(PYTEST) tests/sglang -n 2 --dist loadfile

check: lint types layers  ## Everything a reviewer would not want to say

lint: $(STAMP)  ## Style (ruff) and forbidden words
	$(BIN)/ruff check .
	PRE_COMMIT_HOME=$(VENV)/pre-commit $(BIN)/pre-commit run --all-files --hook-stage manual

types: $(STAMP)  ## Static types (pyright)
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(STAMP)  ## Imports point one way (import-linter)
	$(BIN)/lint-imports --no-cache

format: $(STAMP)  ## Sort imports and apply ruff's safe fixes
	$(BIN)/ruff check --fix .

env: $(STAMP)  ## Build the environment in .venv (again when the requirements change)

$(STAMP): $(REQUIREMENTS)
	@$(PYTHON) -c "import sys; sys.exit(sys.platform != 'linux' or sys.version_info < (3, 10))" \
		|| { echo "The environment needs Linux and Python 3.10 or later (PYTHON=python3.11 make ...)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch, Triton and SGLang in $(VENV): 2.9 GB with a CPU build of torch, more with a CUDA build"
	$(PIP) -r requirements/torch.txt
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) "$(TRITON)"
	$(PIP) -r requirements/cpu.txt
	$(PIP) --no-deps -r requirements/no-deps.txt
	$(PIP) --no-deps --no-compile --upgrade --target $(VENV)/sglang-0.5.23 -r requirements/sglang-0.5.23.txt
	$(PIP) --no-deps --no-build-isolation -e . -e experiments/cpu_host
	touch $@

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist out .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
