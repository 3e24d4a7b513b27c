# Three commands for a person: `make reproduce`, `make test`, `make lab`. `make` alone explains them.
# Each first makes the virtualenv .venv, and again when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq --no-input
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help reproduce test lab venv
.DELETE_ON_ERROR:

define HELP
rstar2lab: rStar2-Agent in the small. Start here:

  make reproduce   train the arms at nano scale with a real sandbox; print one table, write
                   the figures and the executed notebooks (resumes where it was stopped)
  make lab         open JupyterLab on the numbered notebooks
  make test        lint and the fast tests (at most 15 minutes on two cores)

The first of them installs everything into .venv: about 5 minutes and 2 GB with a CPU build of
torch. On Linux, pip's own choice is a CUDA build of torch, and 7 GB.

Options, as NAME=value after the target:
  ARGS="--seeds 5"       passed on: to `rstar2lab reproduce`, to pytest, or to JupyterLab
  TORCH_INDEX=address    where to take torch from (only torch): for a CPU build, the address that
                         PyTorch's page "Start Locally" shows for CPU
  PYTHON=python3.11      the Python that makes .venv: 3.11 to 3.14

Everything else: .venv/bin/rstar2lab --help
endef

help:
	$(info $(HELP))@:

reproduce: $(STAMP)
	$(BIN)/rstar2lab reproduce $(ARGS)

test: $(STAMP)
	$(BIN)/python -m ruff check
	$(BIN)/python -m pytest -m "not full" $(ARGS)

lab: $(STAMP)
	$(BIN)/python -m jupyter lab notebooks $(ARGS)

venv: $(STAMP)

# torch goes first and alone, so that TORCH_INDEX decides its build and nothing else. The second
# step finds it there and adds what it needs.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { \
	  echo "rstar2lab needs Python 3.11 to 3.14, and '$(PYTHON)' is:" \
	    "$$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "Installing into $(VENV): a few minutes, 2 GB (7 GB with a CUDA build of torch)."
	@$(PYTHON) -m venv $(VENV)
	@echo "1/2 $(TORCH)$(if $(TORCH_INDEX), from $(TORCH_INDEX))"
	@$(PIP) install --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@echo "2/2 rstar2lab and what it needs, in the tested versions (constraints.txt)"
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@
	@echo "Installed: $$(du -sh $(VENV) | cut -f1) in $(VENV)."
