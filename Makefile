# Every target does its own set-up: Python 3.11 or 3.12 and pip are all it needs.
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := $(UV) run --frozen
# One thread for each test process; four of them, since half of the time they wait for sockets and clocks.
UNIT := OMP_NUM_THREADS=1 $(RUN) pytest -n 4 --dist loadfile
ENGINE := $(RUN) pytest -m "engine or sglang or slow"

# Every engine starts three processes that import SGLang: without bytecode on disk that doubles their start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup serve test unit engine conformance agentx lint format image clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

.uv/bin/uv:
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --target .uv uv

setup: $(filter .uv/bin/uv,$(UV)) ## Install everything into .venv, from uv.lock
	$(UV) sync --frozen --quiet

serve: setup ## Serve Redis, the engine (small K3 on a CPU) and the gateway on port 8000
	@exec $(RUN) longhaul serve

test: setup ## Lint, then all tests that run on a CPU: unit and engine
	$(MAKE) --no-print-directory lint
	$(UNIT)
	$(ENGINE)

unit: setup ## The fast tests alone, no engine, without what imports SGLang or computes for long
	$(UNIT)

engine: setup ## The tests that boot the real engine on this CPU
	$(ENGINE)

conformance: setup ## Real clients (uv and npm) against the service; installs them into .state/conformance
	$(UV) venv --quiet --allow-existing --python 3.11 .state/conformance
	$(UV) pip install --quiet --python .state/conformance/bin/python -r tests/conformance/requirements.txt
	cp tests/conformance/package.json tests/conformance/ai_sdk.mjs .state/conformance/
	npm install --prefix .state/conformance --no-fund --no-audit --silent
	$(RUN) pytest -m conformance

agentx: setup ## AgentX's own clients against the service, beside our replay; installs them into .state/agentx
	$(UV) venv --quiet --allow-existing --python 3.11 .state/agentx/agentx-harness
	$(UV) pip install --quiet --python .state/agentx/agentx-harness/bin/python agentx-harness==1.0.12
	$(UV) venv --quiet --allow-existing --python 3.11 .state/agentx/aiperf
	$(UV) pip install --quiet --python .state/agentx/aiperf/bin/python aiperf==0.13.0
	$(RUN) python -m bench.agentx

lint: setup ## Check style, types, Dockerfile and compose file
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) pyright
	$(RUN) hadolint Dockerfile
	$(RUN) docker-compose -f deploy/compose.yaml --profile '*' config -q

format: setup ## Rewrite the sources in the project's format
	$(RUN) ruff check --fix-only .
	$(RUN) ruff format .

image: ## Build the container images (docker where its engine runs, else buildah)
	deploy/build-image.sh

clean: ## Remove the environment and all state
	rm -rf .venv .uv .state build
