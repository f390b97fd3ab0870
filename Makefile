# make train   trains on what this machine has: all GPUs, or two processes on the CPU
# make test    lints, checks types, runs the tests, compiles the kernels that are not as recorded
# make aot     compiles every kernel for its GPUs, none needed here, and fails on spills or serialised WGMMA that are new;
#              make aot-record makes what it finds the allowance in kernels/aot/allowance.json
#
# Each makes $(VENV) first when that is missing or older than pyproject.toml or constraints.txt.
#
# A torch that is there already, as on most machines with GPUs, is used with
#
#     make train PYTHON=/path/to/its/python TORCH=installed
#
# or, when it lies in a virtual environment, VENV=/path/to/that TORCH=installed. It brings its own triton: the pins of
# torch, triton and numpy give way to what is installed.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= pinned

BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: train test lint aot aot-record clean

train: $(STAMP)
	$(BIN)/ringflash train auto

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup
	$(BIN)/python -m ringflash.kernels.aot

aot: $(STAMP)
	$(BIN)/python -m ringflash.kernels.aot --all

aot-record: $(STAMP)
	$(BIN)/python -m ringflash.kernels.aot --record --all

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# torch comes first and alone: which other packages it needs, triton among them, depends on its build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "ringflash needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@echo "Installing into $(VENV); this takes a few minutes."
	@rm -f $@
	$(PYTHON) -m venv $(if $(filter installed,$(TORCH)),--system-site-packages) $(VENV)
	$(PIP) install --upgrade 'pip>=25.1'
ifeq ($(TORCH),pinned)
	$(PIP) install "$$(grep '^torch==' constraints.txt)"
endif
	@grep -v $(if $(filter installed,$(TORCH)),-e '^torch==' -e '^numpy==') \
	  $$($(BIN)/python -c 'import triton' 2>/dev/null && echo "-e ^triton==") -e '^\#' constraints.txt > $(VENV)/constraints.txt
	$(PIP) install --constraint $(VENV)/constraints.txt --editable '.[logging]' --group dev
	@touch $@
