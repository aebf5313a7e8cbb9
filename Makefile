# Every chore of the project. `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup demo example test spark-classes test-quick test-durations soak soak-cluster soak-tests lint structure format lock docs bench-capture bench-snapshot bench-sinks bench-verify bench-row-path bench-shaping bench-scale bench-view-state bench-views clean

BIN := .venv/bin
# Our programs are started hundreds of times by the suite: each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready ## Make the virtual environment and install everything into it
.venv/ready: requirements.lock pyproject.toml deploy/setup.sh
	@bash deploy/setup.sh

demo: .venv/ready ## Start real servers, run the pipeline on a small shop, prove that all stores are equal
	@$(BIN)/millrace demo

example: .venv/ready ## Run an example of a view step by step (NAME); without NAME list them
	@$(BIN)/millrace example $(NAME)

test: .venv/ready ## Lint, then run the whole suite against real servers, in WORKERS processes (3)
	@$(MAKE) --no-print-directory -j2 -Otarget lint spark-classes
	@$(BIN)/pytest -n $(or $(WORKERS),3) --dist loadfile --no-loadscope-reorder --junitxml build/tests.xml; \
		status=$$?; $(BIN)/python -m tests.durations build/tests.xml; exit $$status

spark-classes: .venv/ready
	@$(BIN)/python -m tests.spark_classes

test-quick: .venv/ready ## Only what needs neither a server nor Spark, without lint: under two minutes
	@$(BIN)/pytest -q -n 2 --dist worksteal -m 'not soak and not spark' tests/unit tests/properties

test-durations: .venv/ready ## Keep how long each file took in the last `make test` (build/durations.txt): the longest begin first
	@$(BIN)/python -m tests.durations build/tests.xml --keep

soak: .venv/ready ## A busy shop while every process is killed at random; writes bench/results/soak.json (MINUTES, SEED)
	@$(BIN)/python -m bench.soak.run --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

soak-cluster: .venv/ready ## The same on a Spark cluster with Kafka and S3; writes bench/results/soak_cluster.json (MINUTES, SEED)
	@$(BIN)/python -m bench.soak.run --cluster --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

soak-tests: .venv/ready ## The long tests and the many seeds that CI leaves out: hours
	@$(BIN)/pytest -m soak
	@$(BIN)/pytest tests/properties --hypothesis-profile long

lint: .venv/ready ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

structure: .venv/ready ## Modules per folder, modules with one importer, duplicate class names (CHECKOUT)
	@$(BIN)/python -m tests.structure $(CHECKOUT)

format: .venv/ready ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock: .venv/ready ## Resolve the dependencies anew into requirements.lock
	@$(BIN)/pip install -q pip-tools
	@$(BIN)/pip-compile -q --generate-hashes --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links \
		--no-header --extra dev -o requirements.lock pyproject.toml

docs: .venv/ready ## Generate the references: configuration, HTTP, metrics
	@$(BIN)/python -m cdc.cli.reference.configuration
	@$(BIN)/python -m cdc.cli.reference.http

bench-capture: .venv/ready ## WAL into the log: Millrace, Debezium, pg_recvlogical (ROWS, CHANGES, SECONDS, TPS, CONTENDERS)
	@$(BIN)/python -m bench.capture.run

bench-snapshot: .venv/ready ## A whole table into a log: psql, Millrace, Debezium (ROWS, RUNS, CONTENDERS, OUT)
	@$(BIN)/python -m bench.snapshot

bench-sinks: .venv/ready ## The log into the stores, beside usual consumers (ROWS, CHANGES, PEER_CHANGES, SECONDS, TABLES, PARTS)
	@$(BIN)/python -m bench.sinks.run

bench-verify: .venv/ready ## Comparing source and stores: rows a second, CPU a row (ROWS, RUNS, STORES, OUT)
	@$(BIN)/python -m bench.verify

bench-row-path: .venv/ready ## The path of a row, step by step: CPU per change (CHANGES, RUNS, OUT)
	@$(BIN)/python -m bench.row_path

bench-shaping: .venv/ready ## Shaping: CPU per row by the size of a batch (SIZES, RUNS, OUT)
	@$(BIN)/python -m bench.shaping

bench-scale: .venv/ready ## A cluster: CPU of driver and executors, slow stores, idle tables, local[2] (PARTS, CHANGES, BEFORE, RUNS)
	@$(BIN)/python -m bench.scale.run

bench-view-state: .venv/ready ## Where the state of views could live: Spark's operators, transformWithState, ours (KEYS, EVENTS, BATCHES, RUNS, CONTENDERS, PARTS)
	@$(BIN)/python -m bench.views.state.run

bench-views: .venv/ready ## Views: wrong totals, throughput, CPU, latency, beside peers (KINDS, CONTENDERS, PARTS, TRANSACTIONS, SCALE, CHANGES, SECONDS, RATE)
	@$(BIN)/python -m bench.views.run

clean: ## Stop the local servers and remove their data
	@if [ -x $(BIN)/millrace ]; then $(BIN)/millrace local down; fi
	@rm -rf .millrace
