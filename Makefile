# `make quickstart` and `make test` are all that a newcomer needs; `make help` lists the rest.
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

# Compilers at a time in `make horovod`.
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help quickstart horovod horovod-if-possible test test-unit test-distributed test-slurm test-docs run-slurm run-distributed run-others \
	run-oracle run-docs lint format docs reference schemas layers check-layers golden pictures slurm-up slurm-down slurm-status soak faults bench oracle-score rerun-ddlbench rerun-paradl clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "hpcbench needs Python 3.10 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.worker: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[worker]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.worker

# Horovod belongs to one torch: another one in .venv needs another wheel.
$(VENV)/.horovod: $(VENV)/.worker hpcbench/tools/build_horovod.py
	$(BIN)/python -m hpcbench.tools.build_horovod --jobs $(JOBS)
	@touch $@

quickstart: $(VENV)/.worker ## install into .venv and run the quickstart sweep on this machine
	$(BIN)/hpcbench run quickstart

horovod: $(VENV)/.horovod ## build Horovod for .venv's torch, or take it from the cache (JOBS)

# With MPI where it can be had: Adasum has no other transport.
horovod-if-possible: $(VENV)/.dev
	@[ -e $(VENV)/.horovod ] || $(BIN)/python -m tests.packages || echo "MPI is left out: Adasum's test is skipped, or fails where HPCBENCH_REQUIRE names horovod-mpi"
	@$(MAKE) --no-print-directory $(VENV)/.horovod || echo "Horovod is left out: its tests are skipped, or fail where HPCBENCH_REQUIRE names it"

ORACLE := tests/oracle tests/parallel tests/report
UNIT := $(BIN)/pytest --durations 10 -m "not distributed and not slurm and not soak and not faults" --ignore=tests/docs
DISTRIBUTED := $(BIN)/pytest --durations 40 -m "distributed and not slurm and not soak and not faults" --ignore=tests/docs
SLURM := $(BIN)/pytest --durations 40 -m "slurm and not soak" --ignore=tests/docs -rs
DOCS := $(BIN)/pytest -m "not slurm and not soak" tests/docs

# Two at a time, the longest first, so that two cores are busy to the end. What they need is there before: make puts off
# what still waits for something, and begins with the shortest.
test: horovod-if-possible ## everything, a real SLURM included where this machine allows
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=line --keep-going \
		run-slurm run-distributed run-others run-oracle run-docs

test-unit: $(VENV)/.dev ## what needs one process
	@$(MAKE) --no-print-directory run-oracle run-others

test-distributed: horovod-if-possible ## what needs several ranks
	@$(MAKE) --no-print-directory run-distributed

test-slurm: horovod-if-possible ## what needs the SLURM box, which it starts
	@$(MAKE) --no-print-directory run-slurm

test-docs: $(VENV)/.dev ## the commands and files that the documentation shows
	@$(MAKE) --no-print-directory run-docs

run-slurm:
	$(SLURM)

run-distributed:
	$(DISTRIBUTED)

run-others:
	$(UNIT) tests $(addprefix --ignore=,$(ORACLE))

run-oracle:
	$(UNIT) $(ORACLE)

run-docs:
	$(DOCS)

lint: $(VENV)/.dev ## formatting, style, types, layering, structure, vocabulary
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache
	$(BIN)/python tests/structure.py
	$(BIN)/python tests/vocabulary.py

format: $(VENV)/.dev ## let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: reference ## build the documentation as a site, into build/docs/site
	$(BIN)/python docs/make_site.py

reference: $(VENV)/.dev ## write the pages about commands, catalog and schemas anew, and the live screen
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_live_picture.py

schemas: $(VENV)/.dev ## write docs/schemas anew
	@for kind in cluster sweep result; do $(BIN)/hpcbench schema $$kind > docs/schemas/$$kind.json; done

layers: $(VENV)/.worker ## measure the layers of all shipped models anew, into hpcbench/layers
	OMP_NUM_THREADS=1 $(BIN)/python -m hpcbench.worker.layers --all hpcbench/layers

check-layers: $(VENV)/.dev ## compare all of hpcbench/layers with what is measured now
	$(BIN)/pytest tests/worker/test_layers.py -m soak --timeout 1200

golden: $(VENV)/.dev ## write the scripts and terminal plots in tests/golden anew; review the diff
	HPCBENCH_GOLDEN=write $(BIN)/pytest tests/render tests/report/test_plots_terminal.py

pictures: $(VENV)/.worker ## draw what the documentation shows: the quickstart's table, and plots
	$(BIN)/python docs/make_pictures.py

slurm-up: ## start the SLURM box (root; NODES GPUS CPUS MEM LINK)
	$(PYTHON) -m tests.slurm.box up --nodes $(NODES) --gpus $(GPUS) --cpus $(CPUS) --mem $(MEM) --link $(LINK)

slurm-down: ## stop the SLURM box; nothing stays
	$(PYTHON) -m tests.slurm.box down

slurm-status: ## say how the SLURM box is
	$(PYTHON) -m tests.slurm.box status

soak: $(VENV)/.dev ## slow tests and repetitions, most of them on the SLURM box
	$(BIN)/pytest -m soak --timeout 3600

faults: $(VENV)/.dev ## every fault on the SLURM box, as a table
	$(BIN)/pytest -m faults

bench: $(VENV)/.worker ## our own costs against floors and peers
	$(BIN)/python -m benchmarks $(ONLY)

oracle-score: $(VENV)/.dev ## score the oracle on the SLURM box: calibrate, predict, measure, compare (root, 100 min)
	$(BIN)/python -m benchmarks.oracle.box all

rerun-ddlbench rerun-paradl: rerun-%: $(VENV)/.dev ## rerun a paper's matrix on the SLURM box, and write its pages (root, 75 min)
	$(BIN)/python -m benchmarks.rerun $*

clean: ## remove the virtual environment and caches; results stay
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
