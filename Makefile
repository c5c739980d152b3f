# Everything runs in .venv, which the first target that needs it creates. `make help` lists targets.
#   make rl ARGS="steps=5"        settings are passed on to the program
#   make plan ARGS="--config configs/pods/mimo_7b_v5e_8x8.yaml --topology v5e:8x8"
#   make test PYTHON=/path/to/python3.12 VENV=.venv312
#   make test PYTHON=/path/to/python3.12 JAX=0.11.2    another jax than the one in constraints.txt
#   make tpu-check ARGS='-k "v5e and off:8"'            one chunk of those that it compiles
VENV ?= .venv
PYTHON ?=
CONFIG ?= configs/sums.yaml
ARGS ?=
# Its own environment: libtpu prints at start and is probed by every program beside it.
PLAN_VENV ?= .venv-plan
JOBS ?= 2
# A version of jax and jaxlib; each has environments of its own, .venv-jax0.11.2 for instance.
JAX ?=
ifneq ($(JAX),)
override VENV := $(VENV)-jax$(JAX)
override PLAN_VENV := $(PLAN_VENV)-jax$(JAX)
export PLAN_VENV
endif

STAMP := $(VENV)/.installed
PLAN_STAMP := $(PLAN_VENV)/.installed
BIN := $(VENV)/bin
# Large pages for malloc: on CPU a third of a training step went into page faults of fresh buffers.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# Tests keep compiled programs apart from the user's.
test test-long test-full: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
test test-long test-full: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS = 0

.DEFAULT_GOAL := help
.PHONY: help install rl serve plan test test-long test-full features results lint tpu-check gpu-check gpu-wheels clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1@\2/' | column -t -s @ 2>/dev/null \
	  || grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv and install specjax with its development tools

rl: $(STAMP) ## train the embedded policy with GRPO and speculative rollouts
	$(BIN)/python -m train.rl --config $(CONFIG) $(ARGS)

serve: $(STAMP) ## serve the embedded policy behind OpenAI's API on 127.0.0.1:8000
	$(BIN)/python -m serve --config configs/serve.yaml $(ARGS)

plan: $(PLAN_STAMP) ## what a run needs of TPUs that nobody has to have, by their own compiler
	JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
	  $(PLAN_VENV)/bin/python -m train.plan $(ARGS)

PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist loadscope --no-loadscope-reorder -rfEs

test: $(STAMP) ## ruff and the tests, those marked long or slow left out
	$(BIN)/ruff check .
	$(PYTEST) -m "not slow and not long" $(ARGS)

test-long: $(STAMP) ## the tests of a few seconds each, which `make test` leaves out
	$(PYTEST) -m "long and not slow" $(ARGS)

test-full: $(STAMP) ## ruff and every test, with machine code as users get it
	$(BIN)/ruff check .
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(PYTEST) $(ARGS)

features: $(STAMP) ## write docs/features.md anew, from what the programs say
	SPECJAX_WRITE_FEATURES=1 $(BIN)/python -m pytest -q tests/settings/test_feature_table.py

results: $(STAMP) ## write docs/results.md and README's table anew, from bench/results
	$(BIN)/python -m bench.results_page

lint: $(STAMP) ## ruff alone
	$(BIN)/ruff check .

tpu-check: $(STAMP) $(PLAN_STAMP) ## compile for TPUs without one: rounds copy nothing and cost what they should
	SPECJAX_TPU_PYTHON=$(abspath $(PLAN_VENV))/bin/python \
	  $(BIN)/python -m pytest -q -m slow -rs tests/kernels/test_tpu_compiler.py $(ARGS)

gpu-check: $(STAMP) ## compile for GPUs without one; downloads 4 GB into the user's cache, once
	$(BIN)/python -m bench.gpu_check $(ARGS)

gpu-wheels: $(STAMP) ## what a GPU machine without a network lacks, into .wheels
	$(BIN)/python -m bench.gpu_check --wheels $(ARGS)

clean: ## remove .venv, caches and build products (runs/ is kept)
	rm -rf $(VENV) $(PLAN_VENV) .cache .wheels build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A name on the PATH proves nothing (pyenv's shims exist for versions that are not active), so each
# candidate is run. The stamp makes the install happen once per change of what is installed.
$(STAMP): EXTRA := dev
$(PLAN_STAMP): EXTRA := tpu
$(STAMP) $(PLAN_STAMP): pyproject.toml constraints.txt
	@set -e; \
	works() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }; \
	if ! works $(@D)/bin/python; then \
	  python=; \
	  for candidate in $(or $(PYTHON),python3.12 python3.11 python3); do \
	    if works $$candidate; then python=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "make: none of [$(or $(PYTHON),python3.12 python3.11 python3)] is a working Python >= 3.11 with venv; name one: make PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  fi; \
	  echo "creating $(@D) with $$($$python --version)"; \
	  rm -rf $(@D); \
	  $$python -m venv $(@D); \
	fi
	@sed -E '$(if $(JAX),s/^(jax|jaxlib)==.*/\1==$(JAX)/)' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --disable-pip-version-check -q -e '.[$(EXTRA)]' -c $(@D)/constraints.txt
	@touch $@
