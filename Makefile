# make train   trains on what this machine has: all GPUs, or two processes on the CPU
# make test    lints, checks types, runs the tests, compiles the kernels that are not as recorded
# make docs    builds the documentation as a site, build/site/html/index.html; any warning is an error
# make aot     compiles every kernel for its GPUs, none needed here, and fails on spills or serialised WGMMA that are new;
#              make aot-record makes what it finds the allowance in kernels/aot/allowances
# make aot TRITON=3.9.0, make aot-record TRITON=3.9.0    do so under another version of Triton
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
TRITON ?=
NEWEST_TRITON := 3.9.0

BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# pip would compile more than ten thousand modules. The recipe compiles those that training imports, and Python the
# others at their first import.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
AOT := $(BIN)/python -m ringflash.kernels.aot
# Another Triton lies in a folder of its own, and comes first in the path of the processes that compile.
OTHER_TRITON = $(VENV)/triton-$(1)
AOT_UNDER = PYTHONPATH=$(call OTHER_TRITON,$(1)) $(AOT)

.PHONY: train test lint docs aot aot-newest aot-record clean

train: $(STAMP)
	$(BIN)/ringflash train auto

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup
	$(AOT)
	$(MAKE) --no-print-directory aot-newest

aot-newest: $(call OTHER_TRITON,$(NEWEST_TRITON))
	$(call AOT_UNDER,$(NEWEST_TRITON)) --hopper

aot: $(STAMP) $(if $(TRITON),$(call OTHER_TRITON,$(TRITON)))
	$(if $(TRITON),$(call AOT_UNDER,$(TRITON)),$(AOT)) --all

aot-record: $(STAMP) $(if $(TRITON),$(call OTHER_TRITON,$(TRITON)))
	$(if $(TRITON),$(call AOT_UNDER,$(TRITON)),$(AOT)) --record --all

$(VENV)/triton-%: | $(STAMP)
	$(INSTALL) --no-deps --target $@ triton==$* || { rm -rf $@; exit 1; }

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/installed-docs
	$(BIN)/pyright --pythonpath $(BIN)/python --project docs/site
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going --conf-dir docs/site \
	  --doctree-dir build/site/doctrees . build/site/html

$(VENV)/installed-docs: $(STAMP)
	$(INSTALL) --constraint $(VENV)/constraints.txt --editable '.[train,plot,logging,docs]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# torch comes first and alone: which other packages it needs depends on its build. Its CUDA builds need the Triton that
# constraints.txt names; its CPU builds need none, and get the same.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "ringflash needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@echo "Installing into $(VENV); this takes a few minutes."
	@rm -f $@
	$(PYTHON) -m venv $(if $(filter installed,$(TORCH)),--system-site-packages) $(VENV)
	$(INSTALL) --upgrade 'pip>=25.1'
ifeq ($(TORCH),pinned)
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
endif
	@grep -v $(if $(filter installed,$(TORCH)),-e '^torch==' -e '^triton==' -e '^numpy==') -e '^\#' constraints.txt \
	  > $(VENV)/constraints.txt
	$(INSTALL) --constraint $(VENV)/constraints.txt --editable '.[train,plot,logging]' --group dev
	@$(BIN)/python -c 'import torch._inductor.compile_fx, transformers.modeling_utils, ringflash.train' 2>/dev/null || true
	@touch $@
