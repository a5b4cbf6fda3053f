# Every target sets a fresh checkout up by itself, once, and again when its requirements change.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
# What users need; the rest is for development.
INSTALLED := $(VENV)/.installed
PACKAGES := asyncspec protocol/asyncspec_protocol nodes/asyncspec_nodes
# Forked processes for tests, a file each. Tests of processes wait part of the time, so that four keep two cores busy (six: no faster).
TEST_PROCESSES ?= 4
# Tests of what depends on the processor, and of whole stages by its products. Others choose their
# product, or compute as these do.
PROCESSOR_TESTS := $(addprefix tests/backend/test_,abandon.py array_layers.py attention_products.py device.py footprint.py \
  layer_graphs.py linear.py min_rows.py mlas.py probing.py quantized.py selftest.py stacked.py)
# Whole models by those products: their laws hold with AVX2 alone, too. What is not listed here reads files, drafts, or is llama.cpp's.
MODEL_TESTS := $(addprefix tests/backend/test_,exact.py families.py features.py half_precision.py optimized_layers.py quantized_stages.py recurrent.py)
# torch and oneDNN as on a processor without AVX-512; onnxruntime asks the processor itself.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 DNNL_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
# Tests that need no torch, for every Python that pyproject.toml names and that is here.
CORE_TESTS := $(addprefix tests/,actor constraint core policy protocol sim source trace)
PYTHONS := $(addprefix python,$(shell sed -n 's/.*Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml))
# Of make repeat.
REPEATS ?= 100
# Of make soak, seconds.
DURATION ?= 7200
# Of make compat: --newest, --oldest; default: both.
COMPAT ?= --oldest --newest

# One thread per process: parallelism comes from the stages, and the cores are shared.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT  ?= 0
export TOKENIZERS_PARALLELISM ?= false
# Empty: the packages' bytecode is kept, as tests start hundreds of processes that import them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install setup demo test test-all core pythons test-processors test-portable compat check format lint types imports cover fuzz fuzz-wire mutants schedules soak repeat clients nightly clean setup-llama

help:
	@echo "make demo    a plain pipeline and flow side by side, on four emulated computers"
	@echo "make install asyncspec in $(VENV), without tools for development"
	@echo "make test    the tests but those marked slow, some 8 minutes; make test-all: all of them"
	@echo "make core PYTHON=python3.13 VENV=.venv/3.13  tests of the core by another Python; make pythons: by each that is here"
	@echo "make test-processors  tests of matrix products as on a processor with AVX2 alone, and as on another maker's"
	@echo "make test-portable  tests of processes as on macOS: no /proc, /sys, epoll, uvloop and fork; needs root"
	@echo "make check   what CI runs: format, lint, types, imports, tests"
	@echo "make setup-llama  llama.cpp for GGUF files, built from source; without it their tests are skipped"
	@echo "make compat  the wheel with the oldest and the newest versions it allows of what it needs"
	@echo "make types   mypy --strict          make imports  who may import whom"
	@echo "make format  write the format       make cover    branch coverage"
	@echo "make nightly every test, every cell of the matrices, fuzz, schedules, mutants and soak: hours"
	@echo "make fuzz    the property tests with many more examples"
	@echo "make schedules  10,000 random schedules of requests and faults on simulated clusters"
	@echo "make repeat  the tests of processes, $(REPEATS) times (REPEATS), eight at once: whether one is flaky"
	@echo "make fuzz-wire  a million mutated frames for each role of live nodes: an hour"
	@echo "make soak    two hours (DURATION, seconds) of mixed load on a cluster whose machines come and go"
	@echo "make mutants whether tests fail for mistakes in safety-critical lines"
	@echo "make clients programs of others, from their registries, against serve: the table of docs/guide/serving.md"
	@echo "make clean   remove what these made"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "asyncspec is installed into $(VENV), once: some minutes, most of them for torch"
	$(BIN)/python -m pip install -c constraints.txt -e '.[hf]'
	@touch $@

setup: $(STAMP)

$(STAMP): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,hf,milp]'
	@touch $@

# Without llama.cpp's programs, its common library and what reads images: nothing here links them.
setup-llama: export SKBUILD_BUILD_TARGETS := llama
# The wheel's own folder of libraries is what loads; these are copies of it, 40 MB.
setup-llama: export SKBUILD_WHEEL_EXCLUDE := lib/**;include/**;bin/**;llama_cpp/lib/*.so.*.*.*
setup-llama: $(STAMP)
	CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE=$(CURDIR)/tools/llama/library_only.cmake $$CMAKE_ARGS" \
	  $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,hf,llama,milp]'

demo: $(INSTALLED)
	@$(BIN)/asyncspec demo

test: $(STAMP)
	@echo "the tests but those marked slow, which make check runs: some 8 minutes on two idle cores"
	$(BIN)/python -m pytest -m "not slow" --processes $(TEST_PROCESSES)

test-all: $(STAMP)
	$(BIN)/python -m pytest --processes $(TEST_PROCESSES)

core: $(STAMP)
	$(BIN)/python -m pytest -m "not torch" --processes $(TEST_PROCESSES) $(CORE_TESTS)

pythons:
	@for python in $(PYTHONS); do \
	  if $$python -c "" 2>/dev/null; then \
	    $(MAKE) --no-print-directory core PYTHON=$$python VENV=$(VENV)/$$python || exit 1; \
	  else echo "$$python is not here"; fi; \
	done

test-processors: $(STAMP)
	$(AVX2) $(BIN)/python -m pytest -m "not slow" --processes $(TEST_PROCESSES) $(PROCESSOR_TESTS) $(MODEL_TESTS)
	ASYNCSPEC_TEST_OTHER_MAKER=1 $(BIN)/python -m pytest --processes $(TEST_PROCESSES) $(PROCESSOR_TESTS)

test-portable: $(STAMP)
	$(BIN)/python tools/portable

compat: $(STAMP)
	$(BIN)/nox --sessions $(COMPAT:--%=%)

# mypy has one core: it runs beside the first tests.
check: lint
	@$(MAKE) --no-print-directory -j2 imports types test-all

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

cover: $(STAMP)
	$(BIN)/python -m coverage run -m pytest -m "not processes" --timeout 1800
	$(BIN)/python -m coverage report

nightly: export ASYNCSPEC_NIGHTLY := 1
nightly: export HYPOTHESIS_PROFILE ?= random
nightly: test-all pythons test-processors test-portable fuzz schedules mutants clients soak

fuzz: $(STAMP)
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -m "not processes and not torch" --timeout 3600

schedules: $(STAMP)
	$(BIN)/python tools/schedules

# More at once than there are cores: each runs as on a busy machine.
repeat: TEST_PROCESSES := 8
repeat: FILES = $(shell grep -rl 'mark\.processes' tests --include='test_*.py')
repeat: $(STAMP)
	$(BIN)/python -m pytest -m processes --processes $(TEST_PROCESSES) --repeats $(REPEATS) -o console_output_style=classic --tb=short $(FILES)

fuzz-wire: $(STAMP)
	$(BIN)/python tools/fuzz_wire

soak: $(STAMP)
	$(BIN)/python tools/soak --duration $(DURATION)

mutants: $(STAMP)
	$(BIN)/python tools/mutants

# Names of clients; default: all.
clients: $(STAMP)
	$(BIN)/python tools/clients $(CLIENTS)
	$(BIN)/python tools/bench docs

clean:
	rm -rf $(VENV) .clients .nox build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find $(PACKAGES) tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
