# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := torch==2.13.0

.PHONY: demo test acceptance lint format bench constraints clean

demo: $(READY)  ## train, probe, predict, compare; the report is demo/report.html
	$(BIN)/infoflow-lens demo --out demo

test: $(READY)
	$(BIN)/python -m pytest

acceptance: $(READY)  ## the demo's promises with three seeds (about five minutes)
	$(BIN)/python -m pytest -m acceptance -n 0

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy -p infoflow_lens

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks.theory
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.probes
	$(BIN)/python -m benchmarks.influence
	$(BIN)/python -m benchmarks.mechanisms

constraints:  ## pin the environment anew (needs uv)
	mkdir -p build
	echo "$(TORCH)" > build/torch.txt
	uv pip compile --upgrade --universal --python-version 3.10 --all-extras --no-annotate \
		--no-header --constraint build/torch.txt pyproject.toml -o constraints.txt

clean:
	rm -rf $(VENV) build dist demo

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
