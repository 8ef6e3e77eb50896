# Each target makes .venv itself, once. `make help` lists what there is.
PYTHON ?= python3
SCENARIO ?= adversarial
SEED ?=
MODEL ?=
SMOLLM2 := models/SmolLM2-135M-Instruct
RUN := .venv/bin/python
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help sim swarm train model test test-fast lint bench arena regress regress-accept clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1@\2/' | column -t -s@
	@echo "  variables: SCENARIO=$(SCENARIO)  SEED=(the scenario's)  MODEL=(the scenario's: a folder or hub id)  TRAIN=(options: --help lists them)"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(RUN) || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing (a minute or two the first time)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

$(SMOLLM2)/config.json: | $(STAMP)
	@$(RUN) -m refimpl.model.prepare

model: $(STAMP) ## SmolLM2-135M-Instruct into models/, or MODEL=folder-or-hub-id
	@$(RUN) -m refimpl.model.prepare $(MODEL)

sim: $(STAMP) ## simulate SCENARIO, e.g. make sim SCENARIO=adversarial SEED=3
	@$(RUN) -m sim run $(SCENARIO) $(if $(SEED),--seed $(SEED)) $(if $(MODEL),--model $(MODEL))

swarm: $(STAMP) ## the same scenario as real processes on this machine
	@$(RUN) -m sim swarm $(SCENARIO) $(if $(SEED),--seed $(SEED)) $(if $(MODEL),--model $(MODEL))

train: $(STAMP) ## asynchronous GRPO for real: a tiny model learns addition, every node a process; SEED=0
	@$(RUN) -m refimpl.training $(if $(SEED),--seed $(SEED)) $(if $(MODEL),--model $(MODEL)) $(TRAIN)

test: $(STAMP) $(SMOLLM2)/config.json ## the whole suite
	@$(RUN) -m pytest

test-fast: $(STAMP) ## without what takes minutes
	@$(RUN) -m pytest -m "not slow"

lint: $(STAMP) ## ruff and mypy
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check . && $(RUN) -m mypy

bench: $(STAMP) $(SMOLLM2)/config.json ## side-by-side speed against the peers that are installed
	@for bench in generate sampler calls; do echo "== $$bench"; $(RUN) experiments/bench/$$bench.py || exit 1; done
	@echo "toploc, flows, grpo_step and shardcast compare with peers of their own environments, shardcast_delta needs checkpoints: --help says how"

arena: $(STAMP) $(SMOLLM2)/config.json ## every attack before every verifier: tables and pictures in experiments/arena
	@for setting in tiny smollm2; do for what in cost run noise; do $(RUN) -m refimpl.arena $$what $$setting || exit 1; done; done; $(RUN) -m refimpl.arena submissions

regress: $(STAMP) $(SMOLLM2)/config.json ## fails if a verifier detects less than experiments/baselines/detection.json
	@$(RUN) -m refimpl.arena regress

regress-accept: $(STAMP) $(SMOLLM2)/config.json ## record a new baseline, on purpose
	@$(RUN) -m refimpl.arena accept

clean: ## runs, caches and the environment; models stay
	rm -rf .venv runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
