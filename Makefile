# `make` alone lists what there is. Every target brings its own environment (.venv) on first use.
SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Container images set it; without bytecode every process of a test compiles torch and the tests again.
unexport PYTHONDONTWRITEBYTECODE

PY := .venv/bin/python
TIERS := unit sim api e2e chart
# What the session that runs the tests has; empty means the test's own default.
NAME ?=
SEED ?=
ARGS ?=
ALL ?=

.PHONY: help env demo test sim test-long proven docs lint format generate requirements bench wheels sbom kind clean $(TIERS:%=test-%)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z$$%-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '  make %-14s %s\n' 'test-TIER' 'one tier of the tests alone: $(TIERS); ARGS="-k name" goes to pytest'

env:
	@.ci/environment

demo: env ## run an elastic job on a local cluster: nodes come and go, a crash, an urgent job in its queue (ARGS=--help)
	@$(PY) -m elastipod_local.demo.main $(ARGS)

test: env ## lint and run the tests of every tier that this machine can (ALL=1: the slow ones too, as continuous integration)
	@$(PY) tests/tiers.py $(if $(ALL),,--quick) lint $(TIERS) -- $(ARGS)

$(TIERS:%=test-%): test-%: env
	@$(PY) tests/tiers.py $* -- $(ARGS)

sim: env ## run one schedule of the simulator, printed step by step (SEED=number, as a failing test names it)
	@$(PY) -m pytest -q tests/sim -k every_schedule --sim-seed $(or $(SEED),0) --sim-count 1

test-long: env ## run large counts (NAME=one of the long runs, SEED=number); writes .run/long/<name>.json
	@$(PY) tests/tiers.py --long "$(NAME)" $(TIERS) -- $(if $(SEED),--seed $(SEED)) $(ARGS)

proven: env ## write docs/reference/proven.md from the reports of test and test-long
	@$(PY) -m tests.proven

docs: env ## build the documentation site into .run/site; strict: a link that leads nowhere fails it
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet && echo "docs: .run/site/index.html"

lint: env ## check with ruff, mypy --strict, import directions, generated files, spelling, and our own gates (tests/lint)
	@status=0; \
	step() { echo "lint: $$*"; "$$@" || status=1; }; \
	step .venv/bin/ruff check --quiet .; \
	step .venv/bin/ruff format --check --quiet .; \
	MYPY_CACHE_DIR="$${XDG_CACHE_HOME:-$${HOME:-.run}/.cache}/elastipod/mypy" step .venv/bin/mypy; \
	step .venv/bin/lint-imports; \
	step $(PY) -m elastipod_operator.api.generate --check; \
	step $(PY) -m tests.lint; \
	step .venv/bin/codespell .; \
	exit $$status

format: env ## format and sort imports with ruff
	@.venv/bin/ruff check --quiet --fix-only .; .venv/bin/ruff format .

generate: env ## write crds/, the chart's copy and the references of fields and Python names
	@$(PY) -m elastipod_operator.api.generate
	@$(PY) -m tests.python_names

COMPILE = .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-find-links \
	--custom-compile-command "make requirements"
requirements: env ## resolve and pin the requirements again (UPGRADE=--upgrade takes newer versions)
	@$(COMPILE) $(UPGRADE) requirements/bootstrap.in -o requirements/bootstrap.txt
	@$(COMPILE) $(UPGRADE) pyproject.toml --extra dev -o requirements/dev.txt
	@$(COMPILE) $(UPGRADE) pyproject.toml --extra operator -o requirements/operator.txt
	@$(COMPILE) $(UPGRADE) pyproject.toml --extra examples -o requirements/train.txt
	@$(COMPILE) $(UPGRADE) requirements/release.in -o requirements/release.txt
	@$(COMPILE) $(UPGRADE) requirements/peer-frameworks.in -o requirements/peer-frameworks.txt
	@$(COMPILE) $(UPGRADE) requirements/peer-deepspeed.in -o requirements/peer-deepspeed.txt
	@$(COMPILE) $(UPGRADE) requirements/peer-hyp.in -o requirements/peer-hyp.txt
	@$(COMPILE) $(UPGRADE) requirements/peer-original.in -o requirements/peer-original.txt
	@$(COMPILE) $(UPGRADE) requirements/peer-s3.in -o requirements/peer-s3.txt
	@$(COMPILE) $(UPGRADE) requirements/peer-streaming.in -o requirements/peer-streaming.txt
	@$(COMPILE) $(UPGRADE) requirements/peer-torchtitan.in -o requirements/peer-torchtitan.txt
	@$(COMPILE) $(UPGRADE) requirements/peer-trackers.in -o requirements/peer-trackers.txt
	@$(COMPILE) $(UPGRADE) requirements/peer-torch211.in -o requirements/peer-torch211.txt

wheels: env ## build the wheels elastipod and elastipod-agent (the slim one for images) into dist/
	@.ci/wheels

sbom: env ## write what the images contain as CycloneDX into dist/
	@.ci/sbom

kind: ## run Elastipod in a cluster of kind (needs docker, kind, kubectl and helm; CLUSTER=name)
	@.ci/kind

BENCHES = $(patsubst bench/%.py,%,$(wildcard bench/[a-z]*.py))
bench: env ## run the benchmarks (NAME=one of them, ARGS for it); each writes .run/bench/<name>.json and prints a table
	@status=0; for name in $(or $(NAME),$(BENCHES)); do echo "bench: $$name"; $(PY) -m bench.$$name $(ARGS) || status=1; done; exit $$status

clean: ## stop leftover clusters and remove the output of runs and tools (.venv and the cache of built binaries stay)
	@for state in $(wildcard .run/cluster/*/state.json); do \
	  .venv/bin/elastipod local down --name "$$(basename "$$(dirname "$$state")")" || exit 1; \
	done
	@rm -rf .run build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
