# Every target sets up what it needs. A person needs two: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed
PROTOS := $(wildcard protos/shoal/v1/*.proto)

# Bytecode is kept: the tests start hundreds of processes, and each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Empty: all benchmarks, all scenarios.
BENCH ?=
CHAOS ?=

.PHONY: bytecode fuzz property-tests demo models test test-cluster test-gpu test-lowest reference test-frameworks test-engines test-ray test-slurm long e2e coverage chaos simulate scale soak lint check-style check-types check-imports check-spelling check-words check-subjects check-locks docs docs-serve bench bench-strategies bench-kills bench-peers check-protos protos proto-baseline version release lock audit clean help

help:
	@echo "make demo    start a cluster, train a classifier in every consistency mode, draw the curves (under 90 s)"
	@echo "make models  train the models of docs/how-to/models.md and draw their curves (runs/models); FASHION=folder of Fashion-MNIST"
	@echo "make test    lint, type-check, and run the unit and contract tests if that succeeds; PYTEST='tests/unit -k ledger' selects tests"
	@echo "make test-cluster  test clusters of real processes, and faults"
	@echo "make test-gpu  run the tests and the benchmark that need a GPU; GPU=gpu13 for CUDA 13"
	@echo "make test-lowest  run the unit tests with the lowest versions of dependencies that pyproject.toml declares"
	@echo "make test-frameworks  install PyTorch, JAX and Keras, and test the adapters; FULL=1 adds TensorFlow, Transformers and Lightning"
	@echo "make test-engines  install Ray and submitit, and test clusters on Ray and in allocations of Slurm"
	@echo "make reference  install PyTorch, JAX and Flax, compare layers, models and training with PyTorch, and check trees of JAX"
	@echo "make chaos   repeat the fault scenarios and write a report (runs/chaos); CHAOS=name,... selects scenarios, CHAOS_RUNS=5 sets 5 runs for each test"
	@echo "make simulate  run 10,000 seeds of a simulated cluster with faults (runs/simulation); SEEDS=2000 for fewer, SEED=42 replays one"
	@echo "make long    run all tests that have a long form once, in that form"
	@echo "make fuzz    fuzz every decoder and port for ten minutes (runs/fuzz); FUZZ_SECONDS=60 for less, FUZZ_ARGS='--targets npz' for one"
	@echo "make property-tests  let the tests that use Hypothesis draw 50 times as many examples (ten minutes); DRAWS=200 for more"
	@echo "make e2e     test the image and the Compose file on a separate Docker engine, as root (docs/how-to/compose.md); SHOAL_PICTURES=1 renews docs/images"
	@echo "make coverage  measure the coverage of the unit and contract tests; it fails below the minimum"
	@echo "make lint    check style, types, imports, spelling, subjects of commits and documentation"
	@echo "make docs    build the documentation site, in site/; a broken link is an error"
	@echo "make docs-serve  serve the site at http://127.0.0.1:8000, and rebuild it when docs/ changes"
	@echo "make bench   run the benchmarks, also of other systems (docs/explanation/performance.md); BENCH=dense,small selects some"
	@echo "make bench-strategies  compare the distribution strategies, and renew docs/explanation/choosing-a-strategy.md and pipelines.md"
	@echo "make bench-kills  compare systems whose processes are killed every 15 s, for 50 minutes, and renew docs/explanation/surviving-kills.md; KILLS=torchft,... selects systems"
	@echo "make soak    run jobs and sessions for 30 minutes, and check that no role uses more and more (runs/soak)"
	@echo "make scale   measure the coordinator with 1,000 simulated workers and 100 servers, and renew docs/explanation/scale.md"
	@echo "make bench-peers  build the environments of the other systems, in .peers"
	@echo "make protos  regenerate client/shoal/v1 from protos/"
	@echo "make proto-baseline  accept a break of the contract in protos/ (CONTRIBUTING.md)"
	@echo "make version VERSION=0.2.0  set the version everywhere"
	@echo "make release  build wheel, sdist and SBOM in dist/, and test each distribution in a clean environment (docs/how-to/release.md)"
	@echo "make lock    renew the lock files in requirements/ and the list of licences; UPGRADE=1 takes the newest versions"
	@echo "make audit   look for known vulnerabilities of the locked packages; it needs a network"
	@echo "make clean   remove what the other targets made"

# Installs these lock files of requirements/, each file by its hash, and then Shoal itself. The lock files are complete, so pip
# looks for no dependencies. They name no index: pip takes the one that it is configured with.
PIP := $(BIN)/python -m pip --disable-pip-version-check
define INSTALL
$(PIP) install --quiet --no-compile --no-deps --require-hashes $(patsubst %,--requirement requirements/%.txt,build dev $(1))
$(PIP) install --quiet --no-compile --no-deps --no-build-isolation --editable .
endef

$(SETUP): pyproject.toml $(wildcard requirements/*.txt)
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "Shoal needs Python 3.11 to 3.13; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing packages and the developers' tools; this takes a few minutes"
	$(call INSTALL)
	@touch $@

demo: $(SETUP)
	$(BIN)/python examples/demo.py --out runs/demo

# Where Debian's dataset-fashion-mnist puts it.
FASHION ?= /usr/share/datasets/fashion-mnist

models: $(SETUP)
	$(BIN)/python examples/fashion.py --data $(FASHION) --out runs/models
	$(BIN)/python examples/fine_tuning.py --data $(FASHION) --out runs/models

# Some tests wait, so three processes keep two cores busy. Tests on real processes last from one second to forty, so a
# process without tests takes some of another one.
TESTS := $(BIN)/python tests/support/leaks.py $(BIN)/python -m pytest --dist worksteal -n 3

# Compiles all that the tests import, once. In a new checkout, each process of xdist would compile it for itself.
bytecode: $(SETUP)
	@$(BIN)/python -m pytest --quiet --collect-only tests > /dev/null || true

# PYTEST="tests/unit -k ledger" picks some, of all tests. Otherwise all that need no other processes of Shoal, or few.
test: $(SETUP)
	$(MAKE) -j2 --output-sync lint check-protos bytecode
	$(TESTS) $(or $(PYTEST),tests/unit tests/simulation tests/contract tests/deploy)

# Real processes on this machine, and faults: the short forms.
test-cluster: $(SETUP)
	$(TESTS) tests/cluster tests/chaos

# Fails under the floor in pyproject.toml. Of the tests on real processes, those of the strategies and of local clusters
# are measured: the others run code that the contract tests run, too.
coverage: $(SETUP)
	$(TESTS) --cov --cov-report=term tests/unit tests/contract tests/cluster/strategies tests/cluster/test_local_cluster.py

# The extra with CuPy for this machine's CUDA: gpu for 12, gpu13 for 13.
GPU ?= gpu

test-gpu: $(SETUP)
	$(call INSTALL,$(GPU))
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python benchmarks/gpu.py

# Old versions warn of each other, and that is no defect of Shoal. PYTEST selects tests.
LOWEST := runs/lowest

test-lowest: $(SETUP)
	$(call INSTALL,release)
	$(BIN)/python tools/supply_chain/lowest_versions.py $(LOWEST)
	$(LOWEST)/bin/python -m pytest -n 2 -W ignore::DeprecationWarning $(or $(PYTEST),--ignore tests/unit/project tests/unit)

# A plain install of PyTorch or JAX is large: the suite does without. No lock file has it: the index decides which build is right.
reference: $(SETUP)
	$(PIP) install --quiet --editable '.[dev,reference]'
	$(BIN)/python -m pytest -n 2 tests/reference

# The adapters: with PyTorch, JAX, and Keras on both. FULL=1 adds Keras on TensorFlow, Transformers and Lightning. A test whose
# framework is missing is skipped.
FULL ?=

test-frameworks: $(SETUP)
	$(PIP) install --quiet --editable '.[dev,frameworks$(if $(FULL),$(COMMA)transformers)]' $(if $(FULL),tensorflow lightning)
	$(TESTS) tests/frameworks

# Clusters that other engines start, on this machine. The tests of an engine share it, so they run in one process.
ENGINES := test-ray test-slurm

test-engines: $(SETUP)
	$(PIP) install --quiet --editable '.[dev,ray,slurm]'
	$(MAKE) -j2 --output-sync $(ENGINES)

$(ENGINES): test-%:
	$(BIN)/python tests/support/leaks.py $(BIN)/python -m pytest tests/engines/$*

# The files of tests that have long forms, without those of `SHOAL_LONG=1 make test-engines`.
LONG = $(shell grep -rlE --include='test_*.py' --exclude-dir=engines 'run_lengths(\.| import .*)(is_long|long_only|runs|size)' tests)

long: $(SETUP)
	SHOAL_LONG=1 $(TESTS) $(LONG)

# Changed inputs for every decoder, in process and over sockets; FUZZ_ARGS="--targets npz --seed 7" selects. The result
# is runs/fuzz/latest.json.
FUZZ_SECONDS ?= 600
FUZZ_ARGS ?=

fuzz: $(SETUP)
	PYTHONPATH=tests $(BIN)/python -m support.fuzzing --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

# The tests that draw their examples, with more of them.
DRAWS ?= 50

property-tests: $(SETUP)
	SHOAL_DRAWS=$(DRAWS) $(TESTS) -m hypothesis tests/unit

# What is deployed, as it is: no other target starts an engine or a browser. -s: what things took is printed. With SHOAL_E2E
# a program that is not here fails what needs it. A SHOAL_PICTURES of the command line is in the environment, too.
e2e: $(SETUP)
	$(call INSTALL,e2e)
	SHOAL_E2E=1 $(BIN)/python tests/support/leaks.py $(BIN)/python -m pytest -s tests/deploy tests/e2e

# A CHAOS_RUNS of the command line is in the environment, too.
chaos: $(SETUP)
	PYTHONPATH=tests $(BIN)/python -m support.chaos $(CHAOS)

# One process runs one seed at a time; SEED=42 replays a seed, and BUG=fencing_off plants a bug in it.
SEEDS ?= 10000
SEED ?=
BUG ?=

simulate: $(SETUP)
	PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED) $(if $(BUG),--bug $(BUG)),--seeds $(SEEDS))

bench: $(SETUP)
	$(BIN)/python benchmarks/run.py $(BENCH)

# Loss against time and samples by strategy, and the load of servers. It needs a machine that does nothing else, for six minutes.
bench-strategies: $(SETUP)
	$(BIN)/python benchmarks/strategies/compare_strategies.py --keep
	$(BIN)/python benchmarks/strategies/pipeline.py --keep

# Useful samples while processes are killed, for Shoal and for the systems of `make bench-peers`; KILLS=tensorflow,torchft selects some.
KILLS ?=
COMMA := ,

bench-kills: $(SETUP)
	$(BIN)/python benchmarks/kills/compare_kills.py $(subst $(COMMA), ,$(KILLS)) --keep

soak: $(SETUP)
	$(BIN)/python benchmarks/cluster/soak.py

# The control plane with simulated members, and the costs of calls and bytes. It needs a machine that does nothing else.
scale: $(SETUP)
	$(BIN)/python benchmarks/control_plane/scale.py --keep

bench-peers: $(SETUP)
	$(BIN)/python benchmarks/bench_peers.py

lint: check-style check-types check-imports check-spelling check-words check-subjects check-locks docs

# Style, and markers of conflicts in tracked files; git grep exits with 1 if it finds none.
check-style: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@git grep -nI -E '^(<{7}|[|]{7}|={7}|>{7})( |$$)'; case $$? in 1) ;; 0) echo "error: these lines are markers of merge conflicts; resolve them"; exit 1;; *) exit 1;; esac

check-types: $(SETUP)
	$(BIN)/mypy

check-imports: $(SETUP)
	$(BIN)/lint-imports --no-cache --no-logo

# Common misspellings; `.venv/bin/codespell --write-changes` mends them. Words that are right: [tool.codespell].
check-spelling: $(SETUP)
	$(BIN)/codespell

# One term a concept (docs/explanation/glossary.md), docstrings that explain each parameter, and no private names in tests.
check-words: $(SETUP)
	$(BIN)/python tools/lint/duplicate_classes.py
	$(BIN)/python tools/lint/retired_words.py
	$(BIN)/python tools/lint/docstrings.py
	$(BIN)/python tools/lint/private_names.py
	$(BIN)/python tools/lint/long_lines.py

# Of the last commits, because some of the first ones are older than the rule.
check-subjects: $(SETUP)
	$(BIN)/python tools/commits/subject.py --last 30

# Material's notice of its successor is no warning of ours (docs/decisions/0040-documentation-site.md).
GENERATED_DOCS := docs/decisions/index.md docs/project $(addprefix docs/reference/,cli errors limits metrics protocol python)
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

# The lock files agree with pyproject.toml, and all licences are allowed. Neither reads the network.
check-locks: $(SETUP)
	$(BIN)/python tools/supply_chain/lock_files.py
	$(BIN)/python tools/supply_chain/licences.py --check

# The generated pages, which git ignores, then the site. Neither reads the network.
docs: $(SETUP)
	$(BIN)/python tools/docs/generate.py
	$(MKDOCS) build --strict

docs-serve: $(SETUP)
	$(BIN)/python tools/docs/generate.py
	$(MKDOCS) serve --dev-addr 127.0.0.1:8000

define GENERATE
$(BIN)/python -m grpc_tools.protoc -Iprotos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
touch $(1)/shoal/v1/__init__.py
endef

protos: $(SETUP)
	rm -rf client/shoal/v1 && mkdir -p client/shoal/v1
	$(call GENERATE,client)
	$(BIN)/python tools/protos/baseline.py renew --additive

# After a break that is intended, with its line under "Breaking" in CHANGELOG.md.
proto-baseline: $(SETUP)
	$(BIN)/python tools/protos/baseline.py renew

# The generated code that is checked in is what protos/ gives, and protos/ keeps what the baseline promises.
check-protos: $(SETUP)
	rm -rf build/protos && mkdir -p build/protos
	$(call GENERATE,build/protos)
	diff -r --exclude=__pycache__ client/shoal/v1 build/protos/shoal/v1 || \
	  { echo "client/shoal/v1 is not what protos/ gives: run 'make protos' and commit the result"; exit 1; }
	rm -rf build/protos
	$(BIN)/python tools/protos/baseline.py check

# `make version VERSION=0.2.0` sets it everywhere; without VERSION: checks that all mentions agree.
version: $(SETUP)
	$(BIN)/python tools/release/version.py $(VERSION)

# Wheel, sdist and SBOM in dist/, each distribution tried in an environment of its own. The editable install is renewed: its
# version may be older.
release: $(SETUP)
	$(call INSTALL,release sbom)
	$(BIN)/python tools/release/release.py

# Renews the lock files after a change of pyproject.toml, and the list of licences. UPGRADE=1 takes the newest versions.
UPGRADE ?=

lock: $(SETUP)
	$(call INSTALL,release)
	$(BIN)/python tools/supply_chain/renew_locks.py $(if $(UPGRADE),--upgrade)
	$(call INSTALL,e2e release sbom)
	$(BIN)/python tools/supply_chain/licences.py
	@touch $(SETUP)

# Asks a database on the network, so no other target does it. AUDIT=osv asks that of OSV.
AUDIT ?= pypi

audit: $(SETUP)
	$(call INSTALL,release)
	$(BIN)/python tools/supply_chain/audit.py --service $(AUDIT)

clean:
	rm -rf $(VENV) .peers build dist runs site $(GENERATED_DOCS) .mypy_cache .ruff_cache .pytest_cache .coverage .coverage.*
