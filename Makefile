# Two commands: `make race` and `make test`. Both set everything up first; `make setup` is a no-op when nothing changed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
STAMP := $(VENV)/.set-up
BIN := $(VENV)/bin

FUZZ ?= 40

# Tests start hundreds of processes; without cached bytecode each of them compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: race site test test-slow test-gpu lint format setup clean

race: setup
	$(BIN)/h2h race quick --out races/quick

# One page about the studies in results/, with their reports: build/site/index.html.
STUDIES := $(patsubst results/%,build/results/%,$(wildcard results/*/study.json results/*/*/study.json))
site: setup $(STUDIES)
	$(BIN)/h2h site $(STUDIES:/study.json=) --out build/site --title "Results of headtohead"

.SECONDEXPANSION:
build/results/%/study.json: results/%/study.json $$(wildcard results/$$*/runs.tar.gz results/$$*/runs.tar.xz) | setup
	$(BIN)/h2h runs $(@D) --import $(wildcard $(<D)/runs.tar.gz $(<D)/runs.tar.xz) > /dev/null
	cp $(wildcard $(<D)/study.json $(<D)/study.lock.json $(<D)/claims.json) $(@D)

test: lint
	$(BIN)/python -m pytest -q -rs -n 2 --dist worksteal -m "not slow and not gpu" tests

# Everything too long for `make test`, studies on Ray, and property tests with FUZZ times as many examples.
test-slow: $(VENV)/.ray
	H2H_FUZZ=$(FUZZ) $(BIN)/python -m pytest -q -rs -n 2 --dist worksteal -m "slow or fuzz" tests

# On a machine with a CUDA device; GPU_PYTHON may name a Python that has torch, triton and pytest already.
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)
	$(GPU_PYTHON) -m pytest -q -rs -m gpu tests/gpu

lint: setup
	$(BIN)/ruff check headtohead tests benchmarks examples
	$(BIN)/ruff format --check headtohead tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format headtohead tests benchmarks examples
	$(BIN)/ruff check --fix headtohead tests benchmarks examples

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("headtohead needs Python 3.11 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "could not make $(VENV): on Debian, apt install python3-venv"; rm -rf $(VENV); exit 1; }
	@echo "installing PyTorch and the other dependencies in $(VENV): one to a few minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

$(VENV)/.ray: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache headtohead.egg-info
