# make demo       the main story on this machine; APPROVE=auto approves by itself
# make test       all tests, about 9 minutes on 2 cores
# make check      style, types, contracts, templates, documentation
# make docs       the documentation as a site, build/site/index.html
# make synth      the CloudFormation template, offline
# make examples   transformers and Lightning: corrupted, detected, resumed, compared
# make bench      the measurements of the README (minutes)
# make soak       long campaigns (hours); goes on where it was stopped
# make clean      removes what was built
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiled when first imported, and kept: most of what comes along never is, and compiling it all takes half of the set-up.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
APPROVE ?=
SCENARIO ?= default

.PHONY: help demo test check docs synth bench examples soak clean setup setup-dev

help:
	@sed -n 's/^# make /make /p' Makefile

demo: setup
	@APPROVE="$(APPROVE)" SCENARIO="$(SCENARIO)" $(BIN)/python -m demo

test: setup-dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m infra.lint
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs: setup-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

synth: setup
	$(BIN)/python app.py

bench: setup
	$(BIN)/python -m benchmarks.misses
	$(BIN)/python -m benchmarks.fingerprints
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.checkpoint_cost --results benchmarks/results/checkpoint_cost.json

# Real transformers and real Lightning: corrupted, detected, resumed, compared.
examples: setup-dev
	$(BIN)/python -m examples.story huggingface
	$(BIN)/python -m examples.story lightning

# Hours; stop it whenever you like, it goes on where it ended. Results under benchmarks/results.
soak: setup
	$(BIN)/python -m benchmarks.soak
	$(BIN)/python -m benchmarks.faults
	$(BIN)/python -m benchmarks.recovery_faults --results benchmarks/results/recovery_faults.jsonl
	$(BIN)/python -m benchmarks.recovery_storm --results benchmarks/results/recovery_storm.json
	TRUESTEP_FUZZ_INPUTS=10000 $(BIN)/python -m pytest tests/adapters/store_handlers/test_fuzz.py --timeout 0
	$(BIN)/python -m benchmarks.checkpoint_kills --results benchmarks/results/checkpoint_kills.json
	$(BIN)/python -m benchmarks.checkpoint_corruptions --results benchmarks/results/checkpoint_corruptions.json

clean:
	rm -rf .local build cdk.out .pytest_cache .mypy_cache .ruff_cache .hypothesis

setup: $(VENV)/.runtime
setup-dev: $(VENV)/.development

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "truestep needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"

$(VENV)/.runtime: $(VENV)/bin/python pyproject.toml constraints.txt trainer_sdk/pyproject.toml lambdas/requirements.txt
	@echo "Installing what the local stack needs (a few minutes the first time)"
	$(INSTALL) --group runtime --editable trainer_sdk
	$(BIN)/python -m infra.wheelhouse
	@touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(INSTALL) --group development
	@touch $@
