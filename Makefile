# `make demo` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

INTEROP := $(VENV)/.interop

.PHONY: demo test interop slow lint bench clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and by itself, at the pinned version: resolved among the others it could be another build
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray]'
	touch $(READY)

demo: $(READY)
	$(BIN)/rlcollect collect CartPole-v1 --frames 200000 --num-envs 16 --policy random --seed 0 --out runs/cartpole --overwrite

lint: $(READY)
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

# three at a time on two cores: most of the time they wait for processes
test: lint
	$(BIN)/pytest -n 3 --dist worksteal

$(INTEROP): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[interop,envpool]'
	touch $(INTEROP)

interop: $(INTEROP)
	$(BIN)/pytest -n 2 --dist worksteal tests/interop
	$(BIN)/pytest -n 2 --dist worksteal -m "cluster and not slow" tests/cluster tests/cli tests/workers/test_pool_contract.py

# the suites for every kind of collector, with their workers in actors of Ray: half an hour of the whole
ON_RAY := tests/workers/test_parity.py tests/workers/test_faults.py tests/weights/test_suite.py

slow: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal -m slow
	$(BIN)/pytest -n 2 --dist worksteal --ray $(ON_RAY)

bench: $(INTEROP)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis runs/cartpole
