# `make` alone lists the targets. Needs Linux, git, make and Python 3.11 or newer.
VENV ?= .venv
PYTHON ?= python3
ARGS ?=
ifndef REQUIREMENTS
REQUIREMENTS := $(shell nvidia-smi >/dev/null 2>&1 && echo requirements.txt || echo requirements-cpu.txt)
endif

PY := $(VENV)/bin/python
STAMP := $(VENV)/.oat-recipes
# What the stamp must say: a venv that another clone or another kind of machine installed is not ours yet.
WANTED := $(REQUIREMENTS) $(CURDIR)
OFFLINE := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

.PHONY: help setup demo test test-long lint FORCE

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' Makefile
	@echo "variables: VENV=$(VENV) PYTHON=$(PYTHON) REQUIREMENTS=$(REQUIREMENTS) ARGS=\"flags of the recipe or of pytest\""

setup: $(STAMP)  ## install everything into VENV (CUDA where nvidia-smi works, else CPU); a second call does nothing

demo: $(STAMP)  ## online DPO on the embedded task, about ten minutes on two cores; ARGS="--seed 1" adds flags
	$(PY) recipes/dpo_online.py $(ARGS)

test: $(STAMP)  ## the tests that need neither GPU, network nor patience
	$(OFFLINE) $(PY) -m pytest $(ARGS)

test-long: $(STAMP)  ## the tests that take minutes
	$(OFFLINE) $(PY) -m pytest -m "long and not gpu" $(ARGS)

lint: $(STAMP)  ## ruff
	$(PY) -m ruff check .

# A package that an interrupted install left half copied has metadata but no INSTALLER file (pip writes it last): without its
# metadata pip installs it again, and the rest of an interrupted install is kept.
$(STAMP): $(REQUIREMENTS) pyproject.toml $(shell [ "$$(cat '$(STAMP)' 2>/dev/null)" = '$(WANTED)' ] || echo FORCE)
	@set -e; \
	fail() { echo "make setup: $$1" >&2; exit 1; }; \
	was=$$(cut -d' ' -f1 '$(STAMP)' 2>/dev/null || true); \
	[ -z "$$was" ] || [ "$$was" = '$(REQUIREMENTS)' ] || fail "$(VENV) holds $$was, this machine needs $(REQUIREMENTS): name another VENV= or remove $(VENV)"; \
	for info in $(VENV)/lib/python3*/site-packages/*.dist-info; do [ -e "$$info/INSTALLER" ] || rm -rf "$$info"; done; \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  command -v $(PYTHON) >/dev/null || fail "$(PYTHON) not found: install Python 3.11 or newer, or say where it is (PYTHON=...)"; \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    fail "$(PYTHON) is $$($(PYTHON) --version 2>&1), needed is 3.11 or newer: name another one (PYTHON=python3.12)"; \
	  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || fail "$(PYTHON) has no venv module (Debian, Ubuntu: apt install python3-venv)"; \
	  $(PYTHON) -m venv $(VENV); \
	fi; \
	$(PY) -m pip install $(if $(findstring cpu,$(REQUIREMENTS)),--no-deps) -r $(REQUIREMENTS); \
	if ! $(PY) -c 'import torch' 2>/dev/null; then \
	  echo "make setup: this PyTorch is the CUDA build, so its CUDA libraries come too (4 GB; Install in README.md says how to get the CPU build)"; \
	  $(PY) -m pip install $$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' $(REQUIREMENTS)); \
	  $(PY) -c 'import torch' || fail "PyTorch does not import (above)"; \
	fi; \
	echo '$(WANTED)' > $(STAMP)
