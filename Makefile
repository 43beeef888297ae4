# make setup | demo | test | check | fmt: nothing else to learn. Each does the set-up it needs.
# For kernels: make test-gpu | measure-gpu | compile-matrix. For the engine: make soak, 20,000 requests of every kind.
# For the server's page: make test-page, in a headless Chromium.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := pyproject.toml constraints.txt constraints-cpu.txt constraints-cuda.txt scripts/setup.sh
# Workers share the cores, so each computes with one thread: two threads on a busy core are slower than one.
PYTEST := OMP_NUM_THREADS=1 TRITON_DEFAULT_FP_FUSION=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# The oldest and the newest Triton that kernels must work on. They lie outside the venv: a machine without a GPU installs none,
# one with a GPU has its own, and that is the one it tests.
OLD_TRITON := 3.6.0
NEW_TRITON := 3.9.0
OLD := PYTHONPATH=$(CURDIR)/.cache/triton-$(OLD_TRITON)
NEW := PYTHONPATH=$(CURDIR)/.cache/triton-$(NEW_TRITON)
# The compiler of CUDA C++ sources: the version that the CUDA build of torch in constraints-cuda.txt brings along.
NVRTC := 13.0.88
NVRTC_PATH := $(CURDIR)/.cache/nvrtc-$(NVRTC)
COMPILE := TRITON_CACHE_DIR=$(CURDIR)/.cache/triton-cache $(PYTEST) tests/compile
# A client of the server that needs an older click than the venv's: the file of its pins says more.
GUIDELLM := .cache/guidellm-$(shell sed -n 's/^guidellm==//p' requirements-guidellm.txt)/.setup
CHROMIUM := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome || command -v google-chrome-stable)
GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
COMPILERS := $(if $(GPU),,.cache/triton-$(OLD_TRITON)/.setup .cache/triton-$(NEW_TRITON)/.setup .cache/nvrtc-$(NVRTC)/.setup)
# Sweeps are shared out among the devices of `make test`; compile-matrix gives each device all of them.
DEVICES := a100,rtx3090,l40s,h200,b200,rtx5090

.PHONY: setup prepare demo test test-page soak test-gpu measure-gpu compile-matrix check fmt bench clean

setup: $(VENV)/.setup
prepare: $(VENV)/.setup-dev $(COMPILERS) $(GUIDELLM)
demo: setup
	$(BIN)/rapid-llm chat "What is the capital of France? Answer in one sentence." --temperature 0 --stats
test: prepare
	$(PYTEST) tests --ignore tests/kernels --ignore tests/compile
ifeq ($(GPU),yes)
	$(PYTEST) tests/kernels
	$(COMPILE) --devices a100,rtx3090,h200,rtx5090
else
	$(NEW) TRITON_INTERPRET=1 $(PYTEST) tests/kernels
	$(NEW):$(NVRTC_PATH) $(COMPILE) --every 16 --devices a100,rtx3090,rtx5090
	$(OLD) $(COMPILE) --every 12 --devices h200
endif
	@test -n "$(CHROMIUM)" || echo "Chromium was not found, so the server's page was not tested in a browser: apt-get install chromium"
test-page: $(VENV)/.setup-dev
	@test -n "$(CHROMIUM)" || { echo "Chromium was not found: apt-get install chromium" >&2; exit 2; }
	$(PYTEST) -n 0 tests/page
soak: $(VENV)/.setup-dev
	$(BIN)/python -m tests.soak
test-gpu: $(VENV)/.setup-dev
	sh scripts/test_gpu.sh $(BIN)/python .cache/gpu
compile-matrix: $(VENV)/.setup-dev $(COMPILERS)
ifeq ($(GPU),yes)
	$(COMPILE) --devices $(DEVICES)
else
	$(NEW):$(NVRTC_PATH) $(COMPILE) --devices $(DEVICES)
	$(OLD) $(COMPILE) --devices $(DEVICES)
endif
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
	$(BIN)/python -m benchmarks.engine.bench_host
	$(BIN)/python -m benchmarks.engine.bench_http --tiny --streams 1000 --new 32
ifeq ($(GPU),yes)
	$(BIN)/python -m benchmarks.engine.bench_load
	$(BIN)/python -m benchmarks.engine.bench_startup --model qwen3-0.6b
	$(BIN)/python -m benchmarks.engine.bench_decode --model qwen3-0.6b
	$(BIN)/python -m benchmarks.engine.bench_decode --model qwen3-0.6b --option deterministic=true
	$(BIN)/python -m benchmarks.engine.bench_decode --model llama-8b --batch 1,8,64
	$(BIN)/python -m benchmarks.engine.bench_online --model qwen3-0.6b
	$(BIN)/python -m benchmarks.engine.bench_prefix --model qwen3-0.6b
	$(BIN)/python -m benchmarks.engine.bench_http --model qwen3-0.6b --streams 64
	$(BIN)/python -m benchmarks.engine.bench_mixed_load --model qwen3-0.6b
	$(BIN)/python -m benchmarks.kernels.all
endif
	$(BIN)/python -m benchmarks.kernels.report
	$(BIN)/python -m benchmarks.kernels.report --html .cache/kernels.html
measure-gpu: $(VENV)/.setup-dev
	sh scripts/measure_gpu.sh $(BIN)/python .cache/gpu
clean:
	rm -rf .cache/triton-* .cache/nvrtc-* .cache/guidellm-* $(VENV) .mypy_cache .ruff_cache .hypothesis

$(VENV)/.setup: $(PINS)
	PYTHON=$(PYTHON) sh scripts/setup.sh $(VENV)
	touch $@
$(VENV)/.setup-dev: $(VENV)/.setup
	PYTHON=$(PYTHON) sh scripts/setup.sh $(VENV) dev,clients
	touch $@
.cache/triton-%/.setup: | $(VENV)/.setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target .cache/triton-$* triton==$*
	touch $@
.cache/nvrtc-%/.setup: | $(VENV)/.setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target .cache/nvrtc-$* nvidia-cuda-nvrtc==$*
	touch $@
.cache/guidellm-%/.setup: requirements-guidellm.txt | $(VENV)/.setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --no-compile --target .cache/guidellm-$* -r $<
	touch $@
