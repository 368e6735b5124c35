# Each target is a plain command that a person could type. `make` alone lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BOOK := _build/html
# On Linux, `make book TORCH=cpu` takes PyTorch's CPU build (200 MB) instead of the CUDA one (gigabytes).
TORCH ?= default
ifeq ($(TORCH),cpu)
PIP_FLAGS += --extra-index-url https://download.pytorch.org/whl/cpu
endif
# A test that only needs one core should not fight the others for two.
export OMP_NUM_THREADS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup book serve test lint unit notebooks strict pages execute experiments bench repository clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.ready  ## create .venv and install the pinned requirements (book and test do this themselves)

$(VENV)/.ready: requirements.txt requirements-models.txt pyproject.toml tools/setup.py
	@$(PYTHON) tools/setup.py $(VENV) $(PIP_FLAGS)

book: setup  ## build the rendered book from the stored outputs; prints the page to open
	@$(BIN)/python tools/build.py

strict: setup  ## the same build, with every warning an error
	@$(BIN)/python tools/build.py --strict

serve: book  ## build the book and serve it on http://localhost:8000
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory $(BOOK)

test: lint unit notebooks strict pages  ## everything CI checks: lint, unit, notebooks, strict build, pages

lint: setup  ## ruff's checks and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

unit: setup  ## unit and property tests of rc_lib and of the book's sources
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not page" tests

notebooks: setup  ## re-run every notebook through nbval
	$(BIN)/python tools/rerun.py

pages: strict  ## open every rendered page in headless Chromium
	$(BIN)/python -m pytest -q -n 2 -m page tests

execute: setup  ## re-run every notebook and store its outputs (NOTEBOOKS="..." for some)
	$(BIN)/python tools/execute.py $(NOTEBOOKS)

experiments: setup  ## re-run the experiments whose results the book stores (hours)
	$(BIN)/python -m rc_lib run figure2 --scale paper --seeds 0-4
	$(BIN)/python -m rc_lib run figure2 --scale spread --seeds 0-19
	$(BIN)/python -m rc_lib run figure2 --scale prose --seeds 0-19
	$(BIN)/python -m rc_lib run two-arcs --scale paper --seeds 0-4 --workers 2
	$(BIN)/python -m rc_lib run sorting --scale paper --seeds 0-9 --workers 2
	$(BIN)/python -m rc_lib run sorting --scale unit_embedding --seeds 0-9 --workers 2
	$(BIN)/python -m rc_lib run sorting --scale choices --seeds 0-2 --workers 2
	$(BIN)/python -m rc_lib run convex-hull --scale paper --seeds 0-9 --workers 2
	$(BIN)/python -m rc_lib run convex-hull --scale choices --seeds 0-2 --workers 2
	$(BIN)/python -m rc_lib run memorization --scale paper --seeds 0-9
	$(BIN)/python -m rc_lib run memorization --scale unit_start --seeds 0-2 --workers 2
	$(BIN)/python -m rc_lib run memorization --scale choices --seeds 0-1 --workers 2

bench: setup  ## the measurements that the speed claims rest on
	$(BIN)/python -m benchmarks

repository:  ## point every link at your fork: make repository REPO=owner/name
	$(PYTHON) tools/repository.py $(REPO)

clean:  ## remove what was built (keeps .venv)
	rm -rf _build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
