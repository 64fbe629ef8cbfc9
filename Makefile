# `make demo` and `make test` set everything up by themselves, once.

PYTHON ?= python3
VENV ?= .venv
DEMO_OUT ?= demo.mp4
PROMPT ?= a large blue square moves right on a white background
# Test processes, which take files in the order of tests/conftest.py; more of them than
# the machine's cores only slows the compilers down.
JOBS ?= 2
# How long `make faults` tries; with a SEED it repeats what that seed tried.
FAULTS_SECONDS ?= 600
SEED ?=

bin := $(VENV)/bin
installed := $(VENV)/.tpuport-installed

.PHONY: demo test test-all faults lint types clean

demo: $(installed)
	$(bin)/tpuport generate --model cogvideox --prompt "$(PROMPT)" --out "$(DEMO_OUT)"

test: lint types
	$(bin)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# What the default run leaves out too: tests marked slow, sweep and aot.
test-all: lint types
	$(bin)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "" $(PYTEST_ARGS)

# Kills, damaged files, bad checkpoints and full disks at random: docs/faults.md.
faults: $(installed)
	$(bin)/python -m tests.measure.faults --seconds $(FAULTS_SECONDS) $(if $(SEED),--seed $(SEED))

lint: $(installed)
	$(bin)/ruff check .
	$(bin)/ruff format --check .

# As installed, where cli/ is tpuport.cli: mypy finds imports by folders alone.
types: $(installed)
	rm -rf build/types && mkdir -p build/types/tpuport
	ln -s $(CURDIR)/tpuport/* $(CURDIR)/cli build/types/tpuport && ln -s $(CURDIR)/training build/types
	cd build/types && $(abspath $(bin))/mypy --config-file $(CURDIR)/pyproject.toml tpuport training

# Installed again only when the list of dependencies changes. pip runs from outside the
# environment, so that a system Python without ensurepip will do.
$(installed): pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}; name another with PYTHON=...")'
	$(PYTHON) -m venv --without-pip "$(VENV)"
	$(PYTHON) -m pip --python $(bin)/python install --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
