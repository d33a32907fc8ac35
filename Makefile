# `make help` lists what there is. Everything sets up its own environment on first use.

PYTHON ?= python3
DEVICE ?= cuda
ARCH ?= x86_64
export DEVICE ARCH UPSTREAM_WHEEL UPSTREAM_SDIST VERSION BIDIR_CACHE SOURCE_DATE_EPOCH

BUILD_ENV := .venv-build
TEST_ENV := .venv-test
BUILD_PY := $(BUILD_ENV)/bin/python
TEST_PY := $(CURDIR)/$(TEST_ENV)/bin/python
TOOL := $(BUILD_PY) -m tools.build
CPU_WHEEL = $(firstword $(wildcard dist/vllm-*+cpu.bidir.*_x86_64.whl))
WHEEL_INPUTS := upstream.toml NOTICE $(shell find patches overlay tools/build -type f -not -name '*.pyc')
PYTEST := PYTHONDONTWRITEBYTECODE=1 $(TEST_PY) -m pytest -q

.PHONY: help demo wheel prove check-installed lint docs import refresh test test-fast test-full \
	test-wheel test-patches test-connector test-upstream test-e2e fuzz bench-build bench-idle bench-proof bench-leases bench-policies bench-router clean test-faults test-leases test-shapes test-deploy

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: DEVICE=cuda|cpu  ARCH=x86_64|aarch64  UPSTREAM_WHEEL=path  BIDIR_CACHE=folder"

wheel: $(BUILD_ENV)/.made ## build and prove the wheel: dist/vllm-0.29.0+bidir.N-….whl
	@$(TOOL) wheel

prove: $(BUILD_ENV)/.made ## check the wheels in dist/ again
	@$(TOOL) prove dist/*.whl

check-installed: $(BUILD_ENV)/.made ## check an environment: make check-installed ENV=path/to/venv
	@$(TOOL) check-installed --python $(or $(ENV),$(TEST_ENV))/bin/python

lint: $(BUILD_ENV)/.made ## patches and series, import rules, ruff, mypy
	@$(TOOL) lint
	@$(BUILD_ENV)/bin/ruff check .
	@$(BUILD_ENV)/bin/ruff format --check .
	@$(BUILD_ENV)/bin/mypy

docs: $(BUILD_ENV)/.made ## write what is generated in docs/ anew: the router's options
	@$(BUILD_PY) -m tests.router.options_page

import: $(BUILD_ENV)/.made ## make a patch of an upstream diff: make import DIFF=40186.diff
	@$(TOOL) import $(DIFF)

refresh: $(BUILD_ENV)/.made ## rebase the patches: make refresh TO=0.30.0 [CONTINUE=1 | DRY_RUN=1]
	@$(TOOL) refresh --to $(TO) $(if $(CONTINUE),--continue) $(if $(DRY_RUN),--dry-run)

# Those that compare files, and schedulers without engines, run two at a time; engines, and whatever
# looks at the clock closely, have the cores to themselves.
test: $(TEST_ENV)/.made ## everything, CPU only
	@$(MAKE) --no-print-directory lint test-fast
	@$(MAKE) --no-print-directory -j2 --output-sync=target \
		test-wheel test-patches test-connector test-upstream test-deploy
	@$(MAKE) --no-print-directory test-e2e test-faults test-leases test-shapes bench-smoke

# 10,000 histories for each setting of P's cache; 6 groups of 34 conversations.
test-full: export BIDIR_HISTORIES = 10000
test-full: export BIDIR_MUTATED = 34
test-full: export BIDIR_FAULTS = full
test-full: export BIDIR_LEAK_TURNS = 500
test-full: export BIDIR_ROUTER_CONVERSATIONS = 100000
test-full: export BIDIR_API_EXAMPLES = 200
test-full: test ## the same with the full numbers of the long suites

fuzz: $(TEST_ENV)/.made ## random histories over real schedulers: make fuzz [MINUTES=10]
	@PYTHONPATH=. $(TEST_PY) -m tests.connector.fuzz --minutes $(or $(MINUTES),10)

bench-proof: $(TEST_ENV)/.made ## size of a proof, and what making and checking one costs
	@PYTHONPATH=. $(TEST_PY) -m tests.connector.bench_proof

test-fast: $(BUILD_ENV)/.made ## no engine, no vllm: about two minutes
	$(BUILD_PY) -m pytest -q tests/unit tests/property tests/router

test-wheel: $(TEST_ENV)/.made ## invariants of the real CPU wheel
	$(PYTEST) tests/wheel

test-patches: $(TEST_ENV)/.made ## the patched serving classes, and that each patch is needed
	$(PYTEST) tests/patches

test-connector: $(TEST_ENV)/.made ## verified read-back over real schedulers, simulated memory
	$(PYTEST) tests/connector

test-upstream: $(TEST_ENV)/.made ## the base release's own tests against our wheel
	$(PYTEST) tests/upstream

test-deploy: $(TEST_ENV)/.made ## manifests, units, dashboard, and that every metric is explained
	$(PYTEST) tests/deploy

test-e2e: $(TEST_ENV)/.made ## two real CPU engines
	$(PYTEST) tests/e2e

test-faults: $(TEST_ENV)/.made ## engines that die, stand still or run out of memory
	$(PYTEST) tests/faults

test-leases: $(TEST_ENV)/.made ## what D keeps, renewed and given back, on real engines
	$(PYTEST) tests/leases

test-shapes: $(TEST_ENV)/.made ## engines of several ranks, of different size, and several engines
	$(PYTEST) tests/shapes

demo: $(TEST_ENV)/.made ## a conversation over P, D and the router, feature off and on; no GPU
	@$(TEST_PY) -m tools.demo

bench-build: $(BUILD_ENV)/.made ## time and memory of a build against repacking with `wheel`
	@$(BUILD_PY) -m tools.bench.build

bench-idle: $(TEST_ENV)/.made ## what holding finished turns costs an idle engine, stock and ours
	@$(TEST_PY) -m tools.bench.idle

bench-leases: $(TEST_ENV)/.made ## what idle conversations cost a busy D, by lease and else [ARGS=…]
	@PYTHONPATH=. VLLM_LOGGING_LEVEL=ERROR $(TEST_PY) -m tests.connector.bench_heartbeat \
		--json build/bench-leases/heartbeat.json
	@PYTHONDONTWRITEBYTECODE=1 $(TEST_PY) -m tools.bench.leases run \
		--heartbeat build/bench-leases/heartbeat.json $(ARGS)

bench-policies: $(TEST_ENV)/.made ## the router's policies over the same 2P2D, same load [ARGS=…]
	@PYTHONDONTWRITEBYTECODE=1 $(TEST_PY) -m tools.bench.policies run $(ARGS)

bench-router: $(TEST_ENV)/.made ## what the router adds: latency, CPU, memory; beside the sample proxy [ARGS=…]
	@$(TEST_PY) -m tools.bench.router run $(ARGS)

# With a GPU the CUDA wheel, in an environment of its own; else the CPU wheel.
BENCH_ENV := $(if $(shell command -v nvidia-smi),.venv-cuda,$(TEST_ENV))

.PHONY: bench bench-smoke
bench: $(BENCH_ENV)/.made ## read-back off and on, with a report: build/bench/report/ [ARGS=…]
	@PYTHONDONTWRITEBYTECODE=1 $(BENCH_ENV)/bin/python -m tools.bench run $(ARGS)

bench-smoke: $(TEST_ENV)/.made ## the same in its smallest form, as a test
	$(PYTEST) tests/bench

clean: ## remove build results and environments (the download cache stays)
	rm -rf build dist $(BUILD_ENV) $(TEST_ENV) .venv-cuda

$(BUILD_ENV)/.made: tools/requirements/build.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: Python 3.10 or newer is needed; try make PYTHON=python3.12" >&2; exit 2; }
	@echo "setting up $(BUILD_ENV)" >&2
	@$(PYTHON) -m venv $(BUILD_ENV)
	@$(BUILD_PY) -m pip install -q --upgrade 'pip>=23.1'
	@$(BUILD_PY) -m pip install -q -r tools/requirements/build.txt
	@touch $@

# The CPU wheel is rebuilt when anything that goes into it changes; torch comes first, alone, so
# that the resolver keeps that build.
build/cpu-wheel.made: $(BUILD_ENV)/.made $(WHEEL_INPUTS)
	@rm -f dist/vllm-*+cpu.bidir.*_x86_64.whl
	@DEVICE=cpu ARCH=x86_64 $(TOOL) wheel
	@mkdir -p build && touch $@

$(TEST_ENV)/.base: tools/requirements/test.txt tools/requirements/build.txt | build/cpu-wheel.made
	@echo "setting up $(TEST_ENV): torch, vllm's requirements, nixl (a few minutes)" >&2
	@$(PYTHON) -m venv $(TEST_ENV)
	@$(TEST_PY) -m pip install -q --upgrade 'pip>=23.1'
	@$(TEST_PY) -m pip install -q torch==2.13.0
	@$(TEST_PY) -m pip install -q $(CPU_WHEEL) -r tools/requirements/test.txt
	@touch $@

$(TEST_ENV)/.made: $(TEST_ENV)/.base build/cpu-wheel.made
	@$(TEST_PY) -m pip install -q --force-reinstall --no-deps $(CPU_WHEEL)
	@$(TEST_PY) -m tools.build check-installed --manifest $(CPU_WHEEL:.whl=.manifest.json)
	@touch $@

.venv-cuda/.made: $(BUILD_ENV)/.made $(WHEEL_INPUTS)
	@DEVICE=cuda ARCH=$(shell uname -m) $(TOOL) wheel
	@echo "setting up .venv-cuda: torch, vllm's requirements, nixl (several minutes)" >&2
	@$(PYTHON) -m venv .venv-cuda
	@.venv-cuda/bin/python -m pip install -q --upgrade 'pip>=23.1'
	@.venv-cuda/bin/python -m pip install -q dist/vllm-*+bidir.*_$(shell uname -m).whl nixl==1.4.1 'matplotlib>=3.8'
	@touch $@
