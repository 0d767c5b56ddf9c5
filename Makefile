# `make test` and `make demo` each do all the set-up that a fresh machine needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: install test lint types unit test-gpu demo bench clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

test: lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Two workers of one thread each: on two cores, threads that wait for each other cost more than they bring.
unit: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

# All that differs on the GPU of this machine, in whatever Python is given (a CUDA build of PyTorch, Triton, and the packages
# that the tests need).
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q $$(grep -rl --include='test_*.py' cuda tests)

demo: install
	$(BIN)/python -m sfiformer.demo

bench: install
	$(BIN)/python benchmarks/attention.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
