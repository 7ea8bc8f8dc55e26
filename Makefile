# Two commands set up everything they need: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# test processes
JOBS   ?= 2

.PHONY: demo test test-html docs lint types dist-check nightly clean

demo: $(STAMP)
	$(BIN)/python -m graphopt demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --durations=15 tests
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n $(JOBS) --durations=5 tests/codegen

# everything that is too long for CI; writes benchmarks/results/<machine>/nightly.json
nightly: $(STAMP)
	$(BIN)/python benchmarks/nightly.py

lint: $(STAMP)
	$(BIN)/ruff check .

# on an installed copy: type checkers do not follow the package-dir mapping of an editable install
types: $(STAMP)
	rm -rf build/typed
	$(BIN)/pip install -q --no-deps --no-build-isolation --target build/typed .
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p graphopt

# the HTML pages in headless Chromium (Debian's package `chromium`)
test-html: $(STAMP)
	$(BIN)/python tests/html_check.py

# the site in build/site; docs/reference/cli.md from the command line itself.  Broken links and anchors fail
docs: $(STAMP)
	rm -rf build/typed
	$(BIN)/pip install -q --no-deps --no-build-isolation --target build/typed .
	$(BIN)/python -m typer graphopt.cli utils docs --name graphopt --title "Command line" > build/cli.md
	cp build/cli.md docs/reference/cli.md
	$(BIN)/python benchmarks/report.py --html build/benchmarks.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# wheel and sdist, installed in a clean environment; the top-level names they install
dist-check: $(STAMP)
	$(BIN)/python tests/dist_check.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip "setuptools>=77" wheel
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt triton diffusers typer rich numpy scipy sympy pyarrow networkx matplotlib jinja2 pytest pytest-xdist hypothesis accelerate peft torchdata ruff mypy build tensorboard mkdocs mkdocs-material "mkdocstrings[python]"
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf build dist $(VENV) *.egg-info
