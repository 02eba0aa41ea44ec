# Everything one types here; `make` alone prints the list. demo, test, lint and bench set up what they need by themselves:
# Python 3.11 (or another python3 that the pinned versions support), a C++17 compiler and a package index are enough.
#
#   make test PYTHON=python3.12 VENV=/tmp/venv    another interpreter, another environment
#   make test INTERPRETERS="3.10 3.13"            these others too, for the tests that need no torch; `make test-all` has all
#   make test PYTEST_ARGS="tests/unit -k labels"  one run of pytest, on one interpreter, with just these
#   make explore RUNS=10                          the random tests with new examples, so many times
#   make stress SECONDS=600 FLAVOUR=asan          plain (default), gevent, asan or tsan; SEED=... replays; VERSION=3.12 without torch
#   make test-gpu GPU_TABLE=1                     puts what was measured into docs/measurements.md as well

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-print-directory

# The first one that runs: a version manager may put a name on the path that has no interpreter behind it.
PYTHON ?= $(firstword $(foreach name,python3.11 python3,$(shell $(name) -c '' 2>/dev/null && echo $(name))))
VENV ?= .venv
# One more than a small machine has processors: a sixth of a run is spent in tests that wait for a deadline.
JOBS ?= 3
PYTEST_ARGS ?=
INTERPRETERS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
GPU_TABLE ?=
FUZZ_ARGS ?= --inputs 100000
PICTURES ?=
RUNS ?= 3
# SECONDS is a variable of the shell's: what `make` was given goes on by another name.
STRESS_SECONDS := $(or $(SECONDS),60)
FLAVOUR ?= plain
SEED ?=
VERSION ?=

# The order of sets is the same in each run, as the examples of the random tests are: what fails fails again.
export PYTHONHASHSEED := 0
# Where a shell sets it, each of the thousand programs that tests start compiles all modules again: 0.75 s instead of 0.42 s.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# One empty file per finished step of the set-up; a step runs again when something that it was made from is newer.
MADE := $(VENV)/.made
# Other interpreters that calls are measured under, each with an environment of its own inside the first one.
BENCH_VERSIONS := 3.12 3.13

say = @printf '\033[1m%s\033[0m\n' "==> $(1)"
# pip in few words. A configured place for wheels that lacks a package is no problem of ours, so those lines are left out;
# all others are shown, and pipefail keeps pip's own exit status.
define pip
$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input $(1) 2>&1 \
	| { grep --line-buffered -v '^WARNING: Location .* is ignored' || true; }
endef

NATIVE_SOURCES := $(shell find native/include native/src -name '*.h' -o -name '*.cc')
CXX_FILES = $(shell find native -name '*.h' -o -name '*.cc')

.PHONY: help demo docs pictures check test test-all explore stress test-gpu native-test sanitized-test fuzz-readers wheels matrix house lint \
	bench clean
help: ## Print this list
	@printf 'make TARGET, where TARGET is\n'
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

demo: $(MADE)/package ## Train a small GPT under the profiler; write out/trace.json.gz and out/trace.otlp
	$(call say,Training a small GPT under the profiler)
	@$(BIN)/python examples/train_gpt.py $(DEMO_ARGS)

# A page that does not match what it documents is found by tests/docs; here, what makes a site of them finds links that lead nowhere.
docs: $(MADE)/docs ## Build the site of the documentation, build/site/index.html; a warning or a broken link is an error
	$(call say,The site of the documentation)
	@rm -rf build/site
	@$(BIN)/python docs/make/site_sources.py build/site-sources
	@$(BIN)/zensical build --clean --strict 2>&1 | tee build/site.log
	@! grep '^griffe:' build/site.log

pictures: $(MADE)/pictures ## Make the pictures of the documentation anew, docs/images (needs chromium)
	$(call say,The pictures of the documentation)
	@$(BIN)/python docs/make/pictures.py $(PICTURES)

# SINCE=main: what a branch has changed.
SINCE ?= HEAD
check: lint $(MADE)/test ## Lint, and run the tests of what changed since the last commit (SINCE=...): the habit of every day
	$(call say,The tests of what changed since $(SINCE))
	@tests=$$($(BIN)/python tests/changed.py $(SINCE)); $(BIN)/python -m pytest -q -m "not gpu and not exhaustive" \
		--hypothesis-profile=some tests/test_layers.py tests/test_house.py $$tests $(PYTEST_ARGS)

test: native-test $(MADE)/test ## Run the tests: C++ under the sanitizers, then Python on the interpreter of .venv
	$(call say,Python tests)
	@$(if $(PYTEST_ARGS),$(BIN)/python -m pytest $(PYTEST_ARGS),$(MAKE) -f tests/Makefile VENV=$(VENV) JOBS=$(JOBS) \
		INTERPRETERS="$(INTERPRETERS)" EXAMPLES=some)

test-all: native-test $(MADE)/test ## The same with every example, and what needs no torch on every other interpreter
	$(call say,Python tests on every interpreter)
	@$(MAKE) -f tests/Makefile VENV=$(VENV) JOBS=$(JOBS)

explore: $(MADE)/test ## Run the random tests RUNS times with new examples; print how to keep one that fails
	$(call say,Random tests with new examples)
	@for run in $$(seq $(RUNS)); do $(BIN)/python -m pytest -q -m hypothesis --hypothesis-profile=explore tests $(PYTEST_ARGS); done

GENERATED := $(addprefix tests/,test_house.py unit/test_conventions.py unit/test_causes.py docs/test_command_line_page.py \
	docs/test_json_schemas.py torch/test_torch_surface.py)
generated: $(MADE)/test ## Write the pages, tables and schemas that are made from code
	@GOLDEN_ACCEPT=1 $(BIN)/python -m pytest -q $(GENERATED) -k "up_to_date or listed"

stress: $(MADE)/test $(if $(VERSION),$(VENV)/interpreters/$(VERSION)/.made) ## Run random actions on random threads for SECONDS; print the seed
	$(call say,Stress: random actions on random threads)
	@$(BIN)/python tests/stress/run.py --seconds $(STRESS_SECONDS) --flavour $(FLAVOUR) $(if $(SEED),--seed $(SEED)) \
		$(if $(VERSION),--version $(VERSION))

$(VENV)/interpreters/%/.made:
	@$(MAKE) -f tests/Makefile VENV=$(VENV) $@

test-gpu: $(MADE)/test ## Run the tests that need a GPU; write what they measured to build/gpu/devices.md
	$(call say,GPU tests)
	@GPU_TABLE=$(GPU_TABLE) $(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

native-test: ## Run the C++ tests (plain, ASan+UBSan, TSan) and the fuzzers
	$(call say,C++ tests and fuzzers)
	@$(MAKE) -j$(JOBS) -f native/Makefile

sanitized-test: $(MADE)/test ## Run tests with the extension modules and the library for torch under ASan+UBSan and under TSan
	$(call say,Native sources under the sanitizers)
	@$(BIN)/python tests/sanitized.py

fuzz-readers: $(MADE)/test ## Have show and send read malformed files; FUZZ_ARGS="--inputs 1 --seed N" is one of them again
	$(call say,Malformed files)
	@$(BIN)/python tests/fuzz_readers.py $(FUZZ_ARGS)

# Every release of torch that is supported. TORCH="2.13.0 2.14.1" for some of them, or their wheels, or folders of installed ones.
TORCH ?= 2.6.0 2.7.0 2.7.1 2.8.0 2.9.0 2.9.1 2.10.0 2.11.0 2.12.0 2.12.1 2.13.0 2.14.0 2.14.1
PREBUILT := otel_torchprof/_native/prebuilt
wheels: $(MADE)/wheels ## Build dist/*.whl with the library for every release of torch (downloads 9 GB in all, 20 minutes); `make matrix` proves it
	$(call say,The library for each release of torch)
	@$(BIN)/python native/prebuild.py $(PREBUILT) $(TORCH)
	$(call say,The wheel)
	@rm -rf build/wheel && trap 'rm -rf $(PREBUILT)' EXIT && \
		$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libtorch_cpu.so --exclude libc10.so \
		--wheel-dir dist build/wheel/*.whl
	@ls -l dist

# What is tried: an interpreter and a torch. Each gets an environment of its own in build/matrix, of 3 GB with a CUDA build of torch.
MATRIX ?= 3.10+2.8.0 3.11+2.6.0 3.11+2.9.1 3.11+2.13.0 3.11+2.14.1 3.12+2.13.0 3.13+2.14.1 3.14+2.14.1
matrix: $(MADE)/test ## Try every pair of MATRIX="3.11+2.6.0 ..." against its own torch's profiler, with dist/*.whl where it is built
	$(call say,Interpreters and releases of torch)
	@$(BIN)/python tests/matrix.py $(MATRIX)

house: $(MADE)/test ## Print how the package is laid out: modules, folders, cycles, longest functions and files
	@$(BIN)/python tests/house.py

lint: $(MADE)/test $(MADE)/lint ## Check style, types and formatting; changes nothing
	$(call say,Lint)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

bench: $(MADE)/bench $(BENCH_VERSIONS:%=$(VENV)/interpreters/%/.bench) ## Measure us beside torch's profiler, VizTracer and the SDK; print one table
	$(call say,Benchmarks: keep the machine quiet)
	@$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

clean: ## Remove what was built and written; the environment stays (rm -r .venv for a fresh start)
	rm -rf build out .cache *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis $(MADE)/package
	find otel_torchprof -name '*.so' -delete
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The set-up, in order: an environment, torch, the package, and then what one target or another needs besides.

$(MADE)/venv:
	$(if $(PYTHON),,$(error No python3.11 and no python3 on the path: install one or name it with PYTHON=...))
	$(call say,Creating $(VENV) with $(PYTHON))
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(MADE) && touch $@

# A torch that $(PYTHON) has is used, whichever it is: a line in our site-packages points at its. Else it is installed; why it comes
# first, alone and pinned is said in requirements/torch.txt: do not fold it into another step.
$(MADE)/torch: requirements/torch.txt $(MADE)/venv
	@found=$$($(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null || true); \
	if [ -n "$$found" ]; then \
		printf '\033[1m==> Using the torch of %s\033[0m\n' "$(PYTHON)"; \
		echo "$$found" >"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-python.pth"; \
	else \
		printf '\033[1m==> Installing torch: some 200 MB, or 3 GB where the index has builds for CUDA alone\033[0m\n'; \
		$(call pip,-r requirements/torch.txt); \
	fi
	@touch $@

$(MADE)/requirements: requirements/build.txt requirements/package.txt $(MADE)/torch
	$(call say,Installing what the package needs)
	@$(call pip,-c requirements/torch.txt -r requirements/package.txt)
	@touch $@

$(MADE)/package: $(MADE)/requirements pyproject.toml setup.py $(wildcard otel_torchprof/version.py otel_torchprof/_native/build.py \
		otel_torchprof/_native/core.cdef) $(NATIVE_SOURCES)
	$(call say,Building the native core and installing the package in place: a minute or two)
	@$(call pip,--no-build-isolation -c requirements/torch.txt --editable .)
	@touch $@

$(MADE)/test: requirements/test.txt requirements/without-torch.txt $(MADE)/package
	$(call say,Installing what the tests need)
	@$(call pip,-c requirements/torch.txt -r requirements/test.txt)
	@touch $@

$(MADE)/docs: requirements/docs.txt $(MADE)/venv
	$(call say,Installing what builds the site)
	@$(call pip,-r requirements/docs.txt)
	@touch $@

$(MADE)/pictures: requirements/pictures.txt requirements/examples.txt $(MADE)/test
	$(call say,Installing what makes pictures)
	@$(call pip,-c requirements/torch.txt -r requirements/pictures.txt)
	@touch $@

$(MADE)/bench: requirements/bench.txt $(MADE)/test
	$(call say,Installing what the benchmarks need)
	@$(call pip,-c requirements/torch.txt -r requirements/bench.txt)
	@touch $@

# pyenv puts names on the path that run nothing unless this variable chooses a version; nothing else reads it.
interpreter = PYENV_VERSION=$(1) python$(1)
has = $(shell $(call interpreter,$(1)) -c 'import ensurepip' 2>/dev/null && echo yes)

# Without torch, and without the package: its extension modules are of the stable ABI, and taken from the tree.
$(VENV)/interpreters/%/.bench: BIN = $(VENV)/interpreters/$*/bin
$(VENV)/interpreters/%/.bench: requirements/build.txt requirements/package.txt requirements/bench.txt
	$(call say,$(if $(call has,$*),Setting up $(@D),No python$* here: its benchmarks are left out))
	@$(if $(call has,$*),$(call interpreter,$*) -m venv $(@D))
	@$(if $(call has,$*),$(call pip,-r requirements/package.txt -r requirements/bench.txt))
	@$(if $(call has,$*),touch $@)

$(MADE)/wheels: requirements/wheels.txt $(MADE)/package
	$(call say,Installing what proves the tag of a wheel)
	@$(call pip,-r requirements/wheels.txt)
	@touch $@

$(MADE)/lint: requirements/lint.txt $(MADE)/requirements
	$(call say,Installing the linters)
	@$(call pip,-c requirements/torch.txt -r requirements/lint.txt)
	@touch $@
