PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test test-all check setup bench docs tables
help:           ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY)  ## five schemes compared on three tasks, with a report
	$(BIN)/splitstep demo --out demo

test: $(READY)  ## the default test suite
	$(BIN)/pytest -q -n 2

test-all: $(READY)  ## the default suite, the slow tests and the comparisons with peers
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,peer]'
	$(BIN)/pytest -q -n 2 -m ""

check: $(READY) ## format, lint, types, and that imports go downwards only
	$(BIN)/ruff format --check -q
	$(BIN)/ruff check -q
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(READY) ## speed and memory beside peers, into benchmarks/results.json and docs/performance.md
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,bench]'
	$(BIN)/splitstep bench --json > benchmarks/.results.json
	mv benchmarks/.results.json benchmarks/results.json
	$(BIN)/python docs/tables.py --write

docs: $(READY)  ## the documentation as HTML in docs/_build
	$(BIN)/sphinx-build -q -W docs docs/_build

tables: $(READY) ## rewrite the tables of README.md and docs/ from the data
	$(BIN)/python docs/tables.py --write

setup: $(READY) ## the environment .venv with pinned dependencies
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
