# make setup | demo | test | check | fmt: nothing else to learn. Each does the set-up it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := pyproject.toml constraints.txt constraints-cpu.txt constraints-cuda.txt scripts/setup.sh
# Workers share the cores, so each computes with one thread: two threads on a busy core are slower than one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: setup demo test check fmt bench clean

setup: $(VENV)/.setup
demo: setup
	$(BIN)/rapid-llm chat "What is the capital of France? Answer in one sentence." --temperature 0 --stats
test: $(VENV)/.setup-dev
	$(PYTEST) tests
check: $(VENV)/.setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
fmt: $(VENV)/.setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
bench: $(VENV)/.setup-dev
	$(BIN)/python -m benchmarks.engine.bench_offline
	$(BIN)/python -m benchmarks.engine.bench_startup
clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis

$(VENV)/.setup: $(PINS)
	PYTHON=$(PYTHON) sh scripts/setup.sh $(VENV) serve,demo
	touch $@
$(VENV)/.setup-dev: $(VENV)/.setup
	PYTHON=$(PYTHON) sh scripts/setup.sh $(VENV) serve,demo,dev
	touch $@
