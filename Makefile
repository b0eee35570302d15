# Every target makes its own virtual environment first; nothing else needs to be installed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow lint bench tables clean

SCALE ?= tiny

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,lint]'
	touch $@

demo: .venv/ready
	$(BIN)/ttac demo

# A process for each core, and one thread in each: OpenMP threads of several processes get in each other's way.
test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every table and figure of the paper: out/report/index.html
tables: .venv/ready
	$(BIN)/ttac bench all --scale $(SCALE) --jobs 2 --out out/results
	$(BIN)/ttac report out/results --out out/report

# Speed and memory as ratios in one run: a table, and out/benchmarks.json
bench: .venv/ready
	$(BIN)/python benchmarks/all.py --out out/benchmarks.json

clean:
	rm -rf .venv
