# Everything a fresh machine needs: Python 3.11+, pip, make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
BROWSER := $(VENV)/.browser

.PHONY: demo test lint clean

demo: $(STAMP)
	$(BIN)/roundel demo

test: $(STAMP) $(BROWSER)
	$(BIN)/python -m pytest -n auto

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(STAMP): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit('Roundel needs Python 3.11 or newer') if sys.version_info < (3, 11) else None"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $(STAMP)

# A Chromium for the tests of the HTML report, where the machine has none.
$(BROWSER): $(STAMP) tests/browser.py
	$(BIN)/python tests/browser.py
	touch $(BROWSER)

clean:
	rm -rf $(VENV)
