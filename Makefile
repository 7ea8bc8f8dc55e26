# Two commands set up everything they need: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# test processes
JOBS   ?= 2
# other versions of torch that `make test-versions` tests with, each in an environment of its own
VERSIONS ?= 2.12.0 2.14.0
TESTED := diffusers typer rich numpy scipy sympy pyarrow networkx matplotlib jinja2 pytest pytest-xdist hypothesis \
	accelerate peft torchdata tensorboard
# where the numbers are: contracts with torch's private parts, operators, gradients, streaming, distributed
VERSION_TESTS := tests/contracts tests/graphopt/test_first_light.py tests/graphopt/test_cases.py \
	tests/graphopt/test_semantics.py tests/graphopt/test_lora_and_regions.py tests/graphopt/loading/test_accumulate.py \
	tests/graphopt/test_distributed.py tests/graphopt/test_checkpoint.py tests/graphopt/streaming/test_training.py \
	tests/graphopt/test_regions.py tests/codegen/test_operators.py tests/passes/test_pipeline.py tests/passes/test_partition.py

.PHONY: demo test test-versions test-html docs lint types dist-check nightly clean

demo: $(STAMP)
	$(BIN)/python -m graphopt demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --durations=15 tests
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n $(JOBS) --durations=5 tests/codegen

# contract and numeric tests with other versions of torch
test-versions: $(VERSIONS:%=test-torch-%)

test-torch-%: .venv-torch%/.installed
	OMP_NUM_THREADS=1 .venv-torch$*/bin/python -m pytest -q -n $(JOBS) --dist loadfile $(VERSION_TESTS)

.venv-torch%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch$*
	.venv-torch$*/bin/pip install -q --upgrade pip "setuptools>=77" wheel
	grep -v '^torch==\|^triton==' constraints.txt > .venv-torch$*/constraints.txt
	.venv-torch$*/bin/pip install -q -c .venv-torch$*/constraints.txt "torch==$*" $(TESTED)
	.venv-torch$*/bin/pip install -q --no-deps --no-build-isolation -e .
	touch $@
.PRECIOUS: .venv-torch%/.installed

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
	$(BIN)/pip install -q -c constraints.txt triton $(TESTED) ruff mypy build mkdocs mkdocs-material "mkdocstrings[python]"
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf build dist $(VENV) .venv-torch* *.egg-info
