# Everything runs in .venv, which is built from requirements.lock the first time and again whenever that file changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Removed first and written last, so an interrupted set-up is done again.
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup servers run publish schedule objects reindex test check coverage faults sim mutants bench bench-peers chaos lock lock-peers \
	lock-servers clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## Build .venv; the other targets do it when it is due

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("keywise needs Python 3.11 or newer; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@# With a stamp the environment is whole and is brought up to date in place; without one it is built from nothing.
	clear=$$(test -e $@ || echo --clear); rm -f $@; $(PYTHON) -m venv $$clear $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

servers: $(READY) ## Install, fetch and build the servers that tests need; quick once they are there
	PYTHONPATH=tests $(BIN)/python -m servers.install

run: $(READY) ## Run the publishing house example
	$(BIN)/python examples/publishing_house/main.py

publish: $(READY) ## Publish documents through RabbitMQ into OpenSearch and a slow store, and show each of them
	$(BIN)/python examples/publishing/main.py --servers

schedule: $(READY) ## Accept care requests one at a time per market and day, on Postgres, beside a naive desk that overbooks
	$(BIN)/python examples/scheduling/main.py --servers

objects: $(READY) ## Ingest log files from a bucket while workers are killed, beside a naive consumer
	$(BIN)/python examples/objects/main.py --servers

reindex: $(READY) ## Build a search again while its catalogue is edited, swap it in and go back, beside a naive script
	$(BIN)/python examples/reindex/main.py --servers

test: check coverage ## Style, types, tests, and the coverage threshold

check: $(READY) ## Format, lint, types and contracts; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(wildcard src examples benchmarks tests/typing)
	$(BIN)/python -m pytest --quiet tests/typing

# Most tests wait for processes that they start, so a few run side by side; simulated worlds are too slow under coverage.
# The files go out in their order, so that the many short ones of tests/core and tests/flow come last and no worker waits for another.
coverage: $(READY) ## Tests, under coverage but for the simulator; fails below the threshold in pyproject.toml
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests/simulation
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder \
		--ignore tests/simulation --ignore tests/faults
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# They wait for leases to run out and for servers to come back, most of their time.
faults: $(READY) ## Kill and stop real workers and restart their servers, ten times each, as chaos does a hundred times
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal tests/faults

sim: $(READY) ## Simulate 500 seeds with faults
	$(BIN)/keywise simulate --seeds 500
	$(BIN)/keywise simulate --serial --seeds 500
	$(BIN)/keywise simulate --reindex --seeds 200

mutants: $(READY) ## Break each rule on purpose; the simulator has to notice every one
	PYTHONPATH=tests $(BIN)/python -m mutants

bench: $(READY) ## Measure the product beside a bare loop, and renew docs/benchmarks.md
	$(BIN)/python benchmarks/run.py --write docs/benchmarks.md

# The peers have an environment of their own, so that none of them is a dependency of the project.
PEERS := build/peers/.ready

$(PEERS): benchmarks/peers/requirements.txt
	rm -f $@; $(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps --require-hashes --requirement $<
	@touch $@

bench-peers: $(READY) $(PEERS) ## Measure the product beside its peers, and renew docs/benchmarks.md
	$(BIN)/python benchmarks/peers/run.py --write docs/benchmarks.md

chaos: $(READY) ## Kill and stop real workers and restart their servers, a hundred times each; check the store, and how long keys wait
	$(BIN)/python tests/chaos/kill.py
	$(BIN)/python tests/chaos/silence.py
	$(BIN)/python tests/chaos/serial_kill.py
	$(BIN)/python tests/chaos/objects.py
	$(BIN)/python tests/chaos/touch.py
	$(BIN)/python tests/chaos/reindex.py
	$(BIN)/python tests/chaos/swaps.py

# In an environment of its own, so that the tool is no dependency of the project.
lock: ## Renew requirements.lock from pyproject.toml
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet pip-tools==7.6.2
	CUSTOM_COMPILE_COMMAND="make lock" build/lock/bin/pip-compile --quiet --upgrade --strip-extras --generate-hashes \
		--allow-unsafe --extra dev --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
		--output-file requirements.lock pyproject.toml

lock-peers: ## Renew benchmarks/peers/requirements.txt from requirements.in beside it
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet pip-tools==7.6.2
	CUSTOM_COMPILE_COMMAND="make lock-peers" build/lock/bin/pip-compile --quiet --upgrade --strip-extras --generate-hashes \
		--allow-unsafe --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
		--output-file benchmarks/peers/requirements.txt benchmarks/peers/requirements.in

lock-servers: ## Renew tests/servers/requirements.txt from requirements.in beside it
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet pip-tools==7.6.2
	CUSTOM_COMPILE_COMMAND="make lock-servers" build/lock/bin/pip-compile --quiet --upgrade --strip-extras --generate-hashes \
		--allow-unsafe --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
		--output-file tests/servers/requirements.txt tests/servers/requirements.in

clean: ## Remove everything that make made
	rm -rf $(VENV) build dist .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
