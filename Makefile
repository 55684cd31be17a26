# Two commands: `make demo` shows the whole loop, `make test` checks everything. Each sets up what it needs.
# They need Python 3.11 or newer, a Rust toolchain and a C compiler; everything else goes into .venv and target.

PYTHON ?= python3
BIN := .venv/bin
RUST_SOURCES := $(shell find crates -name '*.rs' -o -name 'Cargo.toml') Cargo.toml Cargo.lock rust-toolchain.toml
# Tests spend much time waiting, so two run at once. The slowest are listed, so that slow tests are noticed.
PYTEST := $(BIN)/pytest -n 2 --dist worksteal --durations 20 --durations-min 1
# What the package needs, with its extras for training, development and documentation, as arguments for pip.
REQUIREMENTS = $(shell $(PYTHON) -c 'import shlex, tomllib; \
  project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = project["optional-dependencies"]; \
  print(shlex.join(project["dependencies"] + extras["train"] + extras["dev"] + extras["docs"]))')
PURE_CRATES := -p elasticrec-sample -p elasticrec-table -p elasticrec-cube
# Tests of the crates run graphs with the library inside the onnxruntime wheel.
ORT_LIB = $(shell $(BIN)/python -c 'from elasticrec.serving.onnxruntime import library_path; print(library_path())')

.DEFAULT_GOAL := help
.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: prerequisites
prerequisites:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "missing: Python 3.11 or newer; install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "missing: Python's venv module; install it (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@cargo --version >/dev/null 2>&1 \
	  || { echo "missing: a Rust toolchain; install it with rustup (https://rustup.rs)" >&2; exit 1; }
	@cc --version >/dev/null 2>&1 \
	  || { echo "missing: a C compiler; install one (Debian: apt-get install build-essential)" >&2; exit 1; }

.venv/.created: | prerequisites
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check 'maturin>=1.9,<2'
	@touch $@

MATURIN := PATH="$(CURDIR)/$(BIN):$$PATH" VIRTUAL_ENV="$(CURDIR)/.venv" PIP_QUIET=1 $(BIN)/maturin develop --release --quiet

.venv/.built: .venv/.created pyproject.toml $(RUST_SOURCES) | prerequisites
	@echo "setting up: the Rust extension and the Python packages (a few minutes the first time)"
	@# pip installs packages while cargo compiles; the second maturin run then only installs the package itself
	@$(BIN)/pip install --quiet --disable-pip-version-check $(REQUIREMENTS) & packages=$$!; \
	  $(MATURIN) --skip-install && wait $$packages
	$(MATURIN) --extras train,dev,docs
	@touch $@

.PHONY: setup
setup: .venv/.built ## the virtual environment and the extension

.PHONY: demo
demo: setup ## the whole loop on generated data: train, publish, serve, ask
	@$(BIN)/elasticrec demo

.PHONY: test
test: lint types docs test-rust test-python ## everything that CI runs

.PHONY: quick
quick: lint types ## the inner loop: lint, types and fast tests
	ORT_LIB="$(ORT_LIB)" cargo test --quiet --workspace --exclude elasticrec-py
	$(BIN)/pytest -q -m 'not slow' tests/unit tests/contract

.PHONY: lint
lint: setup ## formatting and lint, Python and Rust
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	cargo fmt --check
	cargo clippy --quiet --workspace --all-targets -- -D warnings

.PHONY: types
types: setup ## mypy, and the stub compared with the extension
	$(BIN)/mypy
	$(BIN)/stubtest elasticrec._core --mypy-config-file pyproject.toml

.PHONY: test-rust
test-rust: setup ## tests of the crates, of the portable fallbacks of SIMD code, and loom
	ORT_LIB="$(ORT_LIB)" cargo test --quiet --workspace --exclude elasticrec-py
	cargo test --quiet $(PURE_CRATES) --features portable
	$(MAKE) test-loom

.PHONY: test-loom
test-loom: ## the wake-up protocol of the scoring queue, over every interleaving of its threads
	RUSTFLAGS="--cfg loom" cargo test --quiet --release --package elasticrec-queue --test loom --target-dir target/loom

.PHONY: test-python
test-python: setup ## tests in Python: units, contracts, the whole loop, killed roles
	$(PYTEST) tests/cluster tests/e2e tests/unit tests/contract

.PHONY: soak
soak: setup ## tests/cluster with twenty kill runs of every strategy, and a minute of overload (hours)
	ELASTICREC_SOAK=20 $(PYTEST) tests/cluster tests/e2e/test_serve_limits.py

.PHONY: mutants
mutants: setup ## disable protections one by one: their tests must fail (an hour)
	$(BIN)/python tests/mutants.py

.PHONY: wheel
wheel: setup ## one abi3 wheel in dist/
	rm -rf dist
	$(BIN)/maturin build --release --quiet --interpreter $(BIN)/python --out dist

.PHONY: reference
reference: setup ## write the reference of job.yaml from the code
	@mkdir -p docs/reference
	$(BIN)/python -m elasticrec.config.reference > docs/reference/job.md

.PHONY: docs
docs: setup ## the documentation site in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.PHONY: deny
deny: ## licences, duplicate crates and sources of all crates (cargo install cargo-deny)
	cargo deny check licenses bans sources

.PHONY: bench
bench: setup ## the speed of the spine and where the time goes
	$(BIN)/elasticrec bench spine

.PHONY: fuzz
fuzz: ## fuzz every decoder, a minute each (nightly Rust and cargo-fuzz)
	@for target in lines snapshot cube delta body wire brpc; do \
	  mkdir -p fuzz/corpus/$$target && cargo +nightly fuzz run $$target fuzz/corpus/$$target fuzz/seeds tests/contract/golden -- -max_total_time=60 -max_len=65536 || exit 1; done

.PHONY: format
format: setup ## format Python and Rust
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --quiet .
	cargo fmt

.PHONY: clean
clean: ## remove everything that the other targets create
	rm -rf .venv target dist site python/elasticrec/*.so
