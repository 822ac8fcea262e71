# Two commands set up everything: `make demo` and `make test`. With TL=3 they, and all others, use
# TransformerLens 3 in an environment of its own: `make test TL=3`; with NEWEST=1, the newest
# packages that pyproject.toml allows, unpinned; with OLDEST=1, the oldest that it names.
PYTHON ?= python3
TL ?= 4
NEWEST ?=
OLDEST ?=
ifneq ($(NEWEST),)
VENV := .venv-newest
PINS :=
else ifneq ($(OLDEST),)
VENV := .venv-oldest
PINS := build/oldest.txt
else ifeq ($(TL),3)
VENV := .venv-tl3
PINS := constraints-tl3.txt
else
VENV := .venv
PINS := constraints.txt
endif
TESTS ?=
SLOW ?=
THIRD ?=
export SLOW THIRD
MINUTES ?= 30
SEED ?= 0
WRITE ?=
BIN := $(VENV)/bin
# With uv, which takes packages from where pip takes them, an environment takes seconds; without it, pip.
# Modules are compiled when they are first imported, for most never are. They are kept compiled, also
# where PYTHONDONTWRITEBYTECODE is set: else each of many processes would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
ifndef UV_FIND_LINKS
export UV_FIND_LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
endif
export UV_DEFAULT_INDEX ?= $(or $(PIP_INDEX_URL),https://pypi.org/simple)
PACKAGES = --quiet $(addprefix --constraint ,$(PINS)) --editable
INSTALL = install() { $(BIN)/uv pip install --python $(BIN)/python $(PACKAGES) "$$1" || \
	$(BIN)/python -m pip install --no-compile $(PACKAGES) "$$1"; }; install
CORE := $(VENV)/.core
READY := $(VENV)/.ready
TORCH := torch==2.13.0
COMPILE = $(BIN)/uv pip compile --universal --python-version 3.10 --all-extras --no-annotate --no-header \
	--no-emit-index-url --no-emit-find-links --constraint build/pins.txt pyproject.toml

.PHONY: demo environment environment-3 check test models acceptance hunt docs notebooks lint format bench constraints clean

demo: $(CORE)  ## train, probe, predict, compare; the report is demo/report.html
	$(BIN)/infoflow-lens demo --out demo

environment: $(READY)  ## what all that follows needs, and nothing else

environment-3:
	$(MAKE) environment TL=3

check: $(READY)  ## before a commit: style, imports, types, and the tests that execute what has changed
	$(BIN)/python -m tests.check

# With SLOW=1 also a third of those that take long and seldom fail, another one after most commits:
# clusters, builds, every study, example and page. With SLOW=all all of them. With THIRD=1 that third
# of all tests but slow ones.
test: $(READY)  ## the tests, or those of TESTS="tests/models tests/hooks"
	$(BIN)/python -m pytest $(if $(SLOW)$(THIRD),-m "not acceptance and not of_another_commit$(if $(SLOW),, and not slow)") $(TESTS)

# 700 MB that is kept; without a network the tests of real models are skipped.
models: $(READY)  ## four real language models, in build/models, once from where packages come from
	$(BIN)/python -m tests.reference.real_models

acceptance: $(READY)  ## the demo's promises with three seeds, theory on 2460 more targets, rounds of chaos (minutes)
	$(BIN)/python -m pytest -m acceptance -n 0

# Goes on behind what build/hunt holds of the same seed.
hunt: $(READY)  ## search for faults, for MINUTES=30 from SEED=0: random inputs, interruptions, mutants
	$(BIN)/python -m tests.hunt --minutes $(MINUTES) --seed $(SEED)

# With WRITE=1 their output in examples/notebooks is replaced.
notebooks: $(READY)  ## run examples/notebooks, and compare their output with what is committed
	$(BIN)/python docs/tools/notebooks.py $(if $(WRITE),--write)

docs: $(READY)  ## the site, in build/site; it asks for no network, built or read
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy -p infoflow_lens

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks.routes
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.probes
	$(BIN)/python -m benchmarks.influence
	$(if $(filter 3,$(TL)),$(BIN)/python -m benchmarks.hosting)

constraints: $(READY)  ## pin both environments anew
	mkdir -p build
	printf '%s\n' "$(TORCH)" > build/pins.txt
	$(COMPILE) --upgrade -o constraints.txt
	cp constraints.txt constraints-tl3.txt
	printf '%s\n' "$(TORCH)" "transformer-lens<4" > build/pins.txt
	$(COMPILE) --upgrade-package transformer-lens -o constraints-tl3.txt

clean:
	rm -rf .venv .venv-tl3 .venv-newest .venv-oldest build dist demo

# The lower bounds of pyproject.toml as pins, of those that run on this Python; torch is as everywhere,
# other packages as they resolve.
build/oldest.txt: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	mkdir -p build
	printf '%s\n' "$(TORCH)" > build/pins.txt
	$(BIN)/uv pip compile --python $(BIN)/python --quiet --no-deps --resolution lowest-direct --extra certificates --extra cluster --extra gguf \
		--constraint build/pins.txt --output-file $@ pyproject.toml > /dev/null

# What the package itself needs is there sooner than what its development needs.
$(CORE): pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/python -m pip install --quiet $(addprefix --constraint ,$(PINS)) uv
	$(INSTALL) .
	touch $@

$(READY): $(CORE)
	$(INSTALL) ".[dev]"
	touch $@
