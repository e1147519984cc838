# Every target sets up what it needs in .venv. `make test` checks everything, `make demo` trains.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SOURCES := loco_compile passes kernels tests benchmarks
TYPING := build/typing/loco_compile

# Two test workers, and distributed tests start 2 to 4 ranks each: one thread for each process.
JOBS ?= 2
PYTEST_ARGS ?=
# A class of tests stays on one worker: it starts its ranks once for all of them.
PYTEST = OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest \
	-n $(JOBS) --dist loadscope

DEMO_STEPS ?= 300
DEMO_RANKS ?= 2

.PHONY: setup test lint typecheck tests test-features demo format clean distclean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e ".[test,bench]"
	touch $@

# All parts run, whatever the first ones say.
test: $(STAMP)
	@failed=; \
	for part in lint typecheck tests; do \
		$(MAKE) --no-print-directory $$part || failed="$$failed $$part"; \
	done; \
	if [ -n "$$failed" ]; then echo "make test: failed:$$failed" >&2; exit 1; fi

lint: $(STAMP)
	@status=0; \
	$(BIN)/ruff check $(SOURCES) || status=1; \
	$(BIN)/ruff format --check $(SOURCES) || status=1; \
	exit $$status

typecheck: $(STAMP)
	@rm -rf $(TYPING) && mkdir -p $(TYPING)
	@ln -s ../../../passes ../../../kernels $(TYPING)/
	@for file in loco_compile/*.py; do ln -s ../../../$$file $(TYPING)/; done
	$(BIN)/mypy

tests: $(STAMP)
	$(PYTEST) tests -m "not features" $(PYTEST_ARGS)

# Every row of docs/fsdp2.md and of docs/recipes.md on real ranks.
test-features: $(STAMP)
	$(PYTEST) tests -m features --timeout 600 $(PYTEST_ARGS)

demo: $(STAMP)
	@mkdir -p build
	$(BIN)/python benchmarks/train.py --method none,loco --ranks $(DEMO_RANKS) \
		--steps $(DEMO_STEPS) --json build/demo.json

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
