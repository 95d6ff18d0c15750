# Everything works on a fresh machine: a virtual environment is made in .venv on first use.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: plan train test check format clean

plan: $(VENV)/.core  ## Plan a real model: layer offset and recompute under a memory limit
	$(BIN)/evenload plan examples/models/llama-3-70b/config.json --pp 8 --tp 4 --sequence-parallel --dp 2 --zero 1 \
		--micro-batches 16 --seq 8192 --memory 72GiB --hardware h100 --out build/llama-3-70b.yaml --force

train: $(VENV)/.torch  ## Train a small model on two processes, under an uneven plan with recomputation
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m evenload train examples/train/plan.yaml \
		--settings examples/train/settings.yaml

test: $(VENV)/.test  ## Run the test suite
	$(BIN)/python -m pytest -n 2

check: $(VENV)/.check  ## Lint, types, room contracts, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(VENV)/.check  ## Rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip

$(VENV)/.core: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable .
	touch $@

$(VENV)/.torch: $(VENV)/.core
	$(PIP) install torch==2.13.0
	touch $@

$(VENV)/.test: $(VENV)/.core $(VENV)/.torch
	$(PIP) install --group test
	touch $@

$(VENV)/.check: $(VENV)/.test
	$(PIP) install --group check
	touch $@
