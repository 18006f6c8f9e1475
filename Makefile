# A new user needs `make quickstart` and `make test`; `make help` lists the other targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# The test cluster of `make slurm-up`; other values replace a running one.
NODES ?= 4
GPUS ?= 4
CPUS ?= 0.4
MEM ?= 3g
LINK ?= 1gbit
# A release of SLURM in place of the machine's own, such as 24.11; RELEASE is one beside it, in `make test-rest`.
SLURM ?=
RELEASE =
# Targets that run beside those of `make test-rest`, such as CI's test-torch.
ALSO =

# The storm of `make chaos`.
MINUTES ?= 20
SEED ?= 1

# Compilers at a time in `make horovod`.
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help quickstart horovod horovod-if-possible test test-all test-rest test-strategy test-slurm test-cuda test-torch run-cli run-distributed run-docs run-others run-slurm lint lint-code lint-types format docs \
	reference schemas layers check-layers golden pictures slurm-up slurm-down slurm-status soak faults chaos bench gpu-check gpu-kit gpu-day oracle-score rerun-ddlbench rerun-paradl clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "hpcbench needs Python 3.10 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.worker: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[worker]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/.worker $(VENV)/.report

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.test $(VENV)/.worker $(VENV)/.report

# Horovod belongs to one torch: another one in .venv needs another wheel.
$(VENV)/.horovod: $(VENV)/.worker hpcbench/tools/build_horovod.py hpcbench/tools/horovod-0.28.1.patch
	$(BIN)/python -m hpcbench.tools.build_horovod --jobs $(JOBS)
	@touch $@

$(VENV)/.report: $(VENV)/.worker
	$(PIP) --editable '.[report]'
	@touch $@

quickstart: $(VENV)/.report ## install into .venv and run the quickstart sweep on this machine
	$(BIN)/hpcbench run quickstart
	@echo
	@echo "next: $(BIN)/hpcbench plot throughput quickstart"
	@echo "      $(BIN)/hpcbench report quickstart --out report.html"
	@echo "      $(BIN)/hpcbench init my-project"

horovod: $(VENV)/.horovod ## build Horovod for .venv's torch, or take it from the cache (JOBS)

# With MPI where it can be had: Adasum has no other transport.
horovod-if-possible: $(VENV)/.dev
	@[ -e $(VENV)/.horovod ] || $(BIN)/python -m tests.packages mpi || echo "MPI is left out: Adasum's test is skipped, or fails where HPCBENCH_REQUIRE names horovod-mpi"
	@$(MAKE) --no-print-directory $(VENV)/.horovod || echo "Horovod is left out: its tests are skipped, or fail where HPCBENCH_REQUIRE names it"

# Tests are marked by their cost, not by their place. hypothesis tries 20 examples in
# `make test` and 100 in `make test-all` (EXAMPLES=repeatable).
PYTEST := $(BIN)/python -m pytest
EXAMPLES ?= fast
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
FAST := not slow and not slurm and not soak and not faults
SLOW := slow and not slurm and not soak and not faults

test: $(VENV)/.test ## the fast tests, with Python packages alone: each strategy on two ranks (8 minutes on 2 cores)
	$(PYTEST) --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile --hypothesis-profile $(EXAMPLES) -m "$(FAST)" -rs

test-all: ## make test and make test-rest, with more examples of the property tests (30 minutes on 2 cores)
	@$(MAKE) --no-print-directory test EXAMPLES=repeatable
	@$(MAKE) --no-print-directory test-rest

# Two at a time, the longest first and the shortest last: two cores stay busy. Their prerequisites are complete before.
test-rest: horovod-if-possible ## the tests that make test-all adds: full parity, Horovod, a real SLURM, a browser, the site
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=line --keep-going run-slurm run-distributed $(ALSO) run-others run-cli run-docs

test-strategy: $(VENV)/.test $(if $(filter horovod,$(S)),horovod-if-possible) ## the tests of one key of the registry, such as S=zero_bubble
	@[ "$(S)" ] || { echo "make test-strategy S=zero_bubble: name a key of the registry (docs/catalog.md)"; exit 2; }
	$(PYTEST) --strategy $(S) -m "not soak and not slurm and not faults"

test-slurm: horovod-if-possible ## tests on the SLURM box, which it starts; with SLURM=24.11 a selection on that release
	@$(MAKE) --no-print-directory run-slurm

# Outside of .venv: its torch is the build for CPUs. One process more than halves the time on two cores.
test-cuda: $(VENV)/.test ## every strategy on fake GPUs: torch's CUDA build and a stub of CUDA (gcc; 6 GB in ~/.cache/hpcbench)
	$(BIN)/python -m tests.cuda pytest tests/cuda tests/worker/test_private_torch.py --numprocesses $(WORKERS) --maxprocesses 8 -rs

# In an environment of its own, made of PYTHON and kept in ~/.cache/hpcbench.
test-torch: $(VENV)/.test ## hpcbench with another release of torch, such as VERSION=2.11.0 [PYTHON=python3.12] (5 GB in ~/.cache/hpcbench)
	@[ "$(VERSION)" ] || { echo "make test-torch VERSION=2.11.0: name a release of torch"; exit 2; }
	$(BIN)/python -m tests.torch_versions $(VERSION) --python $(PYTHON)

# All tests with the marker are in that folder (tests/conftest.py): the collection of the others costs 17 s of processor.
# The second release comes after the first: there is one box at a time.
run-slurm:
	$(if $(SLURM),SLURMBOX_RELEASE=$(SLURM)) $(PYTEST) tests/slurm --durations 20 -m "slurm and not soak$(if $(SLURM), and releases)" -rs
	$(if $(RELEASE),SLURMBOX_RELEASE=$(RELEASE) $(PYTEST) tests/slurm --durations 20 -m "releases and not soak" -rs)

# Not split further: more processes than cores take as long, and lose time limits.
run-distributed:
	$(PYTEST) tests/distributed --durations 20 -m "$(SLOW)" -rs

run-cli:
	$(PYTEST) tests/cli --durations 20 -m "$(SLOW)" -rs

run-docs:
	$(PYTEST) tests/docs --durations 20 -m "$(SLOW)" -rs

run-others:
	$(PYTEST) $(addprefix --ignore tests/,cli distributed docs slurm) --durations 20 -m "$(SLOW)" -rs

# Two at a time: the types take half of the time.
lint: $(VENV)/.dev ## formatting, style, types, layering, structure, vocabulary
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target --keep-going lint-types lint-code

lint-types:
	$(BIN)/mypy

lint-code:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache
	$(BIN)/python tests/structure.py
	$(BIN)/python tests/vocabulary.py

format: $(VENV)/.dev ## format and fix by ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: reference ## build the documentation as a site, into build/docs/site
	$(BIN)/python docs/make_site.py

reference: $(VENV)/.dev ## write the generated pages (commands, catalog, schemas)
	$(BIN)/python docs/make_reference.py

schemas: reference ## the same: docs/schemas are among the generated files

layers: $(VENV)/.worker ## measure the layers of all shipped models into hpcbench/layers
	OMP_NUM_THREADS=1 $(BIN)/python -m hpcbench.worker.layers --all hpcbench/layers

check-layers: $(VENV)/.dev ## measure the layers of all shipped models and compare hpcbench/layers with them
	$(BIN)/pytest tests/worker/test_layers.py -m soak --timeout 1200

golden: $(VENV)/.test ## write the scripts and terminal plots in tests/golden; review the diff
	HPCBENCH_GOLDEN=write $(BIN)/pytest tests/render tests/report/test_terminal_plots.py

pictures: $(VENV)/.worker ## draw the pictures of the documentation: the quickstart's table and plots
	$(BIN)/python docs/make_pictures.py

slurm-up: ## start the SLURM box (root; NODES GPUS CPUS MEM LINK SLURM)
	$(PYTHON) -m tests.slurm.box up --nodes $(NODES) --gpus $(GPUS) --cpus $(CPUS) --mem $(MEM) --link $(LINK) --slurm "$(SLURM)"

slurm-down: ## stop the SLURM box and remove its files
	$(PYTHON) -m tests.slurm.box down

slurm-status: ## print the state of the SLURM box
	$(PYTHON) -m tests.slurm.box status

soak: $(VENV)/.dev ## slow tests and repetitions, most of them on the SLURM box
	$(BIN)/pytest -m soak --timeout 3600

faults: $(VENV)/.dev ## every fault on the SLURM box; then a random storm
	$(BIN)/pytest -m faults
	@$(MAKE) --no-print-directory chaos

chaos: $(VENV)/.dev slurm-up ## random commands and faults on the SLURM box (root; MINUTES, SEED)
	$(BIN)/python -m tests.slurm.chaos storm --minutes $(MINUTES) --seed $(SEED)

bench: $(VENV)/.worker ## measure hpcbench's own costs against lower bounds and peers (ONLY)
	$(BIN)/python -m benchmarks $(ONLY)

# The default cluster is this shell's, as for every command.
gpu-check: $(VENV)/.worker ## run sweeps/gpu-check.toml on one node's GPUs and report on it (CLUSTER)
	$(BIN)/hpcbench run gpu-check $(if $(CLUSTER),--cluster $(CLUSTER))
	$(BIN)/hpcbench report gpu-check $(if $(CLUSTER),--cluster $(CLUSTER))

# The node has no .venv: its own Python, with the kit's packages in a folder beside it where it lacks them.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
KIT_PYTHON ?= 3.12
OUT ?= build/gpu-day
SITE := build/gpu-site

gpu-kit: $(VENV)/.dev ## wheels for a GPU node without a network, into .whl (KIT_PYTHON)
	$(BIN)/python -m benchmarks.gpu_day kit --out .whl --python $(KIT_PYTHON)

gpu-day: ## run everything once on one GPU in seven minutes, or on CPUs with HPCBENCH_GPU_DAY=cpu (OUT, GPU_PYTHON)
	@$(GPU_PYTHON) -c 'import msgspec, pydantic, submitit' 2>/dev/null || $(GPU_PYTHON) -m benchmarks.gpu_day.install_kit .whl $(SITE)
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(SITE) $(GPU_PYTHON) -m benchmarks.gpu_day run --out $(OUT) --device $(or $(HPCBENCH_GPU_DAY),cuda) --wheels .whl

oracle-score: $(VENV)/.dev ## score the oracle on the SLURM box: calibrate, predict, measure, compare; commits (root, 2 hours)
	$(BIN)/python -m benchmarks.oracle.score box all --commit

rerun-ddlbench rerun-paradl: rerun-%: $(VENV)/.dev ## rerun a paper's matrix on the SLURM box, score the oracle on it, and write its pages (root, 2 hours)
	$(BIN)/python -m benchmarks.rerun $*

clean: ## remove the virtual environment and caches; results stay
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
