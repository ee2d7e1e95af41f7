# `make repro` runs the whole experiment, `make test` the tests. Both set up .venv first; a second run installs nothing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

# Only this user may read what the pipeline writes; every tool's state stays inside the repository.
SHELL := /bin/sh
export PREFECT_HOME ?= $(CURDIR)/data/prefect
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export MLFLOW_DISABLE_TELEMETRY ?= true
export DVC_NO_ANALYTICS ?= true
export HF_HUB_DISABLE_TELEMETRY ?= 1
# Threads that wait sleep instead of spinning: several processes share the cores.
export OMP_WAIT_POLICY ?= PASSIVE
# A shell may forbid Python to keep what it compiled. Every process would then compile PyTorch again, which uv, unlike pip,
# does not do at installation: importing a stage takes 23 CPU seconds so, and 9 otherwise.
unexport PYTHONDONTWRITEBYTECODE
# A command that can be stopped follows with exec: make passes SIGTERM on, which a shell in between would not.
ACTIVATE := umask 077 && export PATH="$(CURDIR)/$(BIN):$$PATH" &&
# Two processes of one thread each, for tensors of tests are too small to share; a file's tests stay together, for they
# share what is slow to build, and start in order, for flows take longest and are not last. The slowest are listed.
TEST := OMP_NUM_THREADS=1 python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
	--durations 40 --durations-min 3

.DEFAULT_GOAL := help
.PHONY: help setup repro benchmarks experiments search sample policy test test-long test-ci test-slow mutants check check-scale docs bench format ui paper paper-certified clean

help:
	@echo "make setup   build .venv (once)"
	@echo "make repro   run the whole experiment, or what changed of it; see data/report/report.html"
	@echo "make repro PROFILE=profiles/tiny.yaml   run a ready-made study; see data/reports and dvc exp show"
	@echo "make experiments  DVC's experiments in a table: the best cell of each, and its four epsilons"
	@echo "make search  the best of a random number of candidates within one budget; see data/report/search.html"
	@echo "make sample RUN=data/runs/NAME RECORDS=1000  a synthetic corpus of a finished cell, at no cost; see data/synthetic"
	@echo "make benchmarks  SST-2, WikiText-2 and E2E in two to three hours, beside the papers' figures; see docs/howto/benchmarks.md"
	@echo "make policy  private reinforcement learning, a short version; see data/policy/policy.html"
	@echo "make test    run most tests, in about ten minutes"
	@echo "make test-long  what takes longer: whole flows with real servers, browsers, tutorials; statistics of attacks"
	@echo "make test-ci  most tests and two whole experiments, as continuous integration runs them"
	@echo "make mutants plant some 700 bugs, one at a time in a copy, and see that a test notices each"
	@echo "make bench   the price of a private step beside plain LoRA and Opacus, in 5 minutes; see data/benchmarks"
	@echo "make check   lint, types, import rules"
	@echo "make check-scale  Dask and Ray clusters of this machine, one worker killed; see docs/howto/cluster.md"
	@echo "make docs    build the documentation; see build/site/index.html"
	@echo "make ui      Prefect UI and scheduler, and MLflow UI, on this machine"
	@echo "make paper   the published study: real table, hub models, RLDP and seven baselines (needs GPUs);"
	@echo "make paper-certified  the same at equal certified epsilon, with sound mechanisms alone"

setup: $(SETUP)

# By uv, in a third of pip's time; by pip where uv cannot.
$(SETUP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install.py
	touch $(SETUP)

# make repro PROFILE=profiles/tiny.yaml runs that study as an experiment of DVC, and changes no file of the checkout. On a
# fresh machine the tables of Prefect and MLflow are made meanwhile, by a process that Ctrl-C does not cut off.
repro: $(SETUP)
	@$(ACTIVATE) { { test -n "$$PREFECT_API_URL" || test -e "$$PREFECT_HOME/prefect.db" || python -m flows.databases; } >/dev/null 2>&1 & \
		exec python -m flows.repro $(if $(PROFILE),--profile $(PROFILE)); }

# The papers' benchmarks in the small protocol, beside what the papers claim. Goes on where it was stopped.
benchmarks: $(SETUP)
	@$(MAKE) repro PROFILE=profiles/bench-small.yaml
	@$(ACTIVATE) python -m tasks.report.benchmarks $(foreach name,sst2 wikitext e2e,--experiment bench-$(name)-small)

search: $(SETUP)
	@$(ACTIVATE) exec env OMP_NUM_THREADS=1 python -m flows.search $(if $(PROFILE),--profile $(PROFILE))

# A cell that trained on prompts with targets or chats needs PROMPTS=FILE; one without a certified epsilon NO_GUARANTEE=1.
sample: $(SETUP)
	@$(ACTIVATE) python -m tasks.synthetic $(if $(RUN),"$(RUN)") $(if $(RECORDS),--records "$(RECORDS)") \
		$(if $(PROMPTS),--prompts "$(PROMPTS)") $(if $(NO_GUARANTEE),--no-guarantee)

policy: $(SETUP)
	@$(ACTIVATE) exec env OMP_NUM_THREADS=1 python -m flows.policy $(if $(PROFILE),--profile $(PROFILE))

# Columns for the figures of each experiment's best cell, and for what is compared most; `dvc params diff` shows the rest.
# Without an experiment there is nothing that differs: then all of these columns are shown.
experiments: $(SETUP)
	@$(ACTIVATE) changed=$$(test -z "$$(dvc exp list --all-commits --name-only)" || echo --only-changed); \
		dvc exp show $$changed --drop '^(?!Experiment$$|mechanism$$|perplexity(/|$$)|epsilon[_/]|experiment\.(mechanisms|epsilons|seeds|accounting)$$|training\.learning_rate$$)'

test: $(SETUP)
	@$(ACTIVATE) $(TEST) -m "not system and not long and not slow and not gpu and not scale"

# What takes minutes: tools as a user meets them, from servers to browsers, and statistics. Run it before a release, and
# after a change to flows, stages, pages or servers: CI runs two whole experiments of it, one with private telemetry.
test-long: $(SETUP)
	@$(ACTIVATE) $(TEST) -m "(system or long) and not slow and not gpu and not scale"

# What CI runs: `make test`, and of the long tests two whole experiments, in one session, which imports and builds once.
test-ci: $(SETUP)
	@$(ACTIVATE) $(TEST) -m "(road or not system and not long) and not slow and not gpu and not scale"

test-slow: $(SETUP)
	@$(ACTIVATE) $(TEST) -m "not scale"

mutants: $(SETUP)
	@$(ACTIVATE) python -m tests.mutants

check-scale: $(SETUP)
	@$(ACTIVATE) OMP_NUM_THREADS=1 python -m pytest -m scale

bench: $(SETUP)
	@$(ACTIVATE) python -m benchmarks.speed

check: $(SETUP)
	@$(ACTIVATE) ruff check . && ruff format --check . && mypy && lint-imports

format: $(SETUP)
	@$(ACTIVATE) ruff format . && ruff check --fix . && python -m tasks.dvc_deps

docs: $(SETUP)
	@$(ACTIVATE) NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --quiet && echo "open build/site/index.html"

ui: $(SETUP)
	@$(ACTIVATE) exec python -m flows.ui

paper: $(SETUP)
	@$(MAKE) repro PROFILE=profiles/paper.yaml

paper-certified: $(SETUP)
	@$(MAKE) repro PROFILE=profiles/paper-certified.yaml

# Not data/runs: the ledgers there are all that tells what was spent on the records.
clean:
	rm -rf data/report data/prefect
