# The commands of the project: everything a new machine needs is set up by the first one that is called.
#   make train [ALGO=ppo] [ENV=CartPole-v1] [ARGS="--num-envs 16"]    train, watch, evaluate, record
#   make test                                                         lint, types, import contract, tests
#   make install                                                      only prepare .venv
PYTHON ?= python3
ALGO ?= ppo
ENV ?= CartPole-v1
ARGS ?=
BIN := .venv/bin

.PHONY: train test install clean
.DELETE_ON_ERROR:

train: .venv/ready
	$(BIN)/flotilla train $(ALGO) --env-id $(ENV) --capture-video $(ARGS)

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2

install: .venv/ready

# torch comes first and alone, so that no other package can pull in another build of it.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .import_linter_cache
