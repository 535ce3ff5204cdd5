# Everything that desk and CI call. `make` alone says what there is.
#
# Settings: PYTHON=python3.12   which Python makes .venv
#           CONFIG=my-run.toml  what `make up` runs;  ARGS='--run.steps 20' is added to up, demo and pytest
#           WORKERS=2           how many processes share the tests (4; 0: this one alone, for a debugger)

PYTHON ?= python3
CONFIG ?= config/arithmetic.toml
ARGS ?=
WORKERS ?= 4
export PYTHON
unexport PYTHONDONTWRITEBYTECODE  # each of the tests' processes would compile the code again
SHELL := bash
comma := ,

# Called by module, not by script: a script's first line cannot hold a path with a space.
VENV_PYTHON := .venv/bin/python
# A file's tests stay in one process, in their order; files are taken in that of tests/conftest.py, the longest first.
PYTEST := $(VENV_PYTHON) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help demo demo-agent demo-reasoning up test faults fuzz mutants portability portability-processes storm quick check collected beside computing lint style format types imports openapi dashboards models images clean install install-dev

help:
	@echo "make demo    train the arithmetic example on this machine, from nothing"
	@echo "make demo-agent  train a tiny agent to use a calculator, and measure it before and after; minutes"
	@echo "make demo-reasoning  train a real model of 135 million parameters: on a GPU to the end, on a CPU five steps"
	@echo "make up      the same for CONFIG=your.toml"
	@echo "make test    all tests, from nothing        make quick   those that take no whole run"
	@echo "make faults  a real run with Prometheus, and every guard and alert raised by its fault; 3 to 8 minutes"
	@echo "make portability  what compares floats, under the instruction sets of older CPUs and other numbers of threads"
	@echo "make portability-processes  the same for tests that start trainers; ROUNDS=10 times each, counted"
	@echo "make mutants breaks 40 laws one by one; their tests must notice; ARGS=NAME for one"
	@echo "make storm   30 minutes of faults over a real run, then the audit; ARGS='--seed 7'"
	@echo "make check   what CI runs: ruff, mypy, the import rule, all tests, the faults"
	@echo "make openapi write docs/openapi.json, the description of the HTTP API"
	@echo "make dashboards write deploy/k8s/penstock-monitoring/dashboards from deploy/dashboards"
	@echo "make models  write docs/models.md from tests/support/model_verdicts.toml"
	@echo "make images  build the small images without a registry, and run them as the chart does"
	@echo "make format  let ruff format the code       make clean   remove .venv and caches (runs/ stays)"

install:
	@bash .ci/install all

install-dev:
	@bash .ci/install dev

demo: install
	@$(VENV_PYTHON) -m penstock.services.cli up config/arithmetic.toml $(ARGS)

demo-agent: install
	@$(VENV_PYTHON) -m penstock.services.cli up examples/calculator/run.toml $(ARGS)
	@$(VENV_PYTHON) -m examples.calculator.measure examples/calculator/policy runs/latest/policy

# On a GPU it needs vLLM, too, which is several GB.
REASONING := $(shell if nvidia-smi -L >/dev/null 2>&1; then echo one-gpu; else echo cpu; fi)
demo-reasoning:
	@bash .ci/install $(if $(filter cpu,$(REASONING)),all$(comma)reasoning,all$(comma)reasoning$(comma)vllm)
	@$(VENV_PYTHON) examples/reasoning/prepare.py
	@$(VENV_PYTHON) -m penstock.services.cli up examples/reasoning/$(REASONING).toml $(ARGS)

up: install
	@$(VENV_PYTHON) -m penstock.services.cli up "$(CONFIG)" $(ARGS)

test: install-dev
	$(PYTEST) $(IGNORED) $(ARGS)

faults: install-dev
	$(VENV_PYTHON) -m pytest -m faults -x tests/chaos/test_faults.py tests/chaos/test_episodes.py

# What compares floats, with the kernels of older CPUs and other numbers of threads: <ATEN_CPU_CAPABILITY>:<ONEDNN_MAX_CPU_ISA>:<OMP_NUM_THREADS>.
MACHINES := default:SSE41:1 avx2:AVX2:2 avx512:AVX512_CORE:4
portability: install-dev
	@for machine in $(MACHINES); do \
		IFS=: read -r aten onednn threads <<< "$$machine"; echo "== $$machine"; \
		ATEN_CPU_CAPABILITY=$$aten ONEDNN_MAX_CPU_ISA=$$onednn OMP_NUM_THREADS=$$threads \
			$(PYTEST) -m "not slow and not faults" $$(grep -rl tests.support.tolerance tests --include="test_*.py") $(ARGS) || exit; \
	done

# The same for tests that start trainer processes, ROUNDS times each; it runs to its end and fails if any test did. `native` sets no instruction set.
ROUNDS ?= 1
PROCESSES ?= $(addprefix tests/trainer/,test_ranks.py test_nodes.py test_repeating.py test_learning.py test_service.py rank0/test_publication.py rank0/test_journal.py)
PROCESS_MACHINES := default:SSE41:1 avx2:AVX2:2 native::4
portability-processes: install-dev
	@failed=0; for round in $$(seq $(ROUNDS)); do for machine in $(PROCESS_MACHINES); do \
		IFS=: read -r aten onednn threads <<< "$$machine"; \
		kernels=(); [ -z "$$onednn" ] || kernels=(ATEN_CPU_CAPABILITY=$$aten ONEDNN_MAX_CPU_ISA=$$onednn); \
		for file in $(PROCESSES); do \
			echo "== round $$round of $(ROUNDS), $$machine, $$file"; \
			env "$${kernels[@]}" OMP_NUM_THREADS=$$threads $(PYTEST) "$$file" $(ARGS) || failed=$$((failed + 1)); \
		done; done; done; echo "$$failed of the files' runs failed"; exit $$((failed > 0))

# Needs root, and Debian's buildah, crun and debootstrap. The GPU images' wheels are several GB: `make images IMAGES="rollout trainer"`.
IMAGES ?= coordinator reward executor
images: install-dev
	@deploy/docker/build-local $(IMAGES)
	$(VENV_PYTHON) -m pytest tests/deploy/test_built_images.py $(ARGS)

storm: install-dev
	$(VENV_PYTHON) -m benchmarks.runs.storm --seconds 1800 $(ARGS)

fuzz: install-dev
	PENSTOCK_FUZZ_MESSAGES=$${PENSTOCK_FUZZ_MESSAGES:-20000} $(VENV_PYTHON) -m pytest -s tests/chaos/test_fuzz.py

mutants: install-dev
	$(VENV_PYTHON) -m tests.support.mutants $(ARGS)

quick: install-dev
	$(PYTEST) -m "not slow" $(ARGS)

# The faults mostly wait: beside them run the types and tests that only compute, at the lowest priority, which takes them no time.
COMPUTING := tests/trainer/model/test_models.py tests/trainer/model/test_trees.py
check: install-dev
	@$(MAKE) --no-print-directory style
	@$(MAKE) --no-print-directory -j 2 imports collected
	@$(MAKE) --no-print-directory test IGNORED="$(addprefix --ignore=,$(COMPUTING))"
	@$(MAKE) --no-print-directory -j 3 faults beside

# Compiles once what the tests' processes import, which would all do it at the same time. What fails here fails in the tests.
collected: install-dev
	-@$(VENV_PYTHON) -m pytest --collect-only -qq >/dev/null 2>&1

beside:
	@nice -n 19 $(MAKE) --no-print-directory types computing

computing: install-dev
	$(VENV_PYTHON) -m pytest $(COMPUTING)

lint: style
	$(VENV_PYTHON) -m pytest -q -n 0 tests/test_docs.py

style: install-dev
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .

types: install-dev
	$(VENV_PYTHON) -m mypy

imports: install-dev
	$(VENV_PYTHON) -c "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"

openapi: install-dev
	$(VENV_PYTHON) -m penstock.services.coordinator.api.openapi docs/openapi.json

dashboards: install-dev
	$(VENV_PYTHON) -m deploy.dashboards

models: install-dev
	$(VENV_PYTHON) -m tests.support.model_page

format: install-dev
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

clean:
	rm -rf .venv build dist penstock.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
