# make demo    train a CNN on handwritten digits with 2 servers and 2 workers on this machine
# make test    the whole test suite; make check adds ruff and mypy
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test check lint proto bench test-compose clean

setup: $(VENV)/.setup-done

$(VENV)/.setup-done: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "needs $(PYTHON); set PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,dev]'
	@touch $@

demo: setup
	$(BIN)/ps-run --servers 2 --workers 2 -m psworker.examples.digits

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup
	$(BIN)/python -m pytest

check: lint test

proto: # regenerate common/psproto from proto/ with the pinned old generator
	PYTHON=$(PYTHON) proto/generate

test-compose: # 2 servers and 2 workers in containers; needs a Docker engine
	deploy/test-compose

clean:
	rm -rf $(VENV) dist build
