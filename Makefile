# Every target works on a bare machine with Python >= 3.11, a C compiler and make: what is missing
# goes into .venv. The package is installed as users install it (not editable), so that the tests
# see what the wheel carries, and again only when a source has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml CMakeLists.txt constraints.txt \
	$(shell find qtool formats kernels recipes -type f -not -path '*/__pycache__/*' 2>/dev/null)
DEMO := out/tiny-w4g128-awq
ROOT := $(CURDIR)
# The tests are small matrices; threads of a BLAS only stand in each other's way.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow test-oracle test-sanitize lint kernels clean

demo: $(VENV)/.installed
	rm -rf $(DEMO)
	$(BIN)/qtool quantize tiny --recipe w4g128-awq -o $(DEMO)
	$(BIN)/qtool inspect $(DEMO)

test: $(VENV)/.installed-test
	$(BIN)/pytest -q

test-slow: $(VENV)/.installed-test
	$(BIN)/pytest -q -m slow

test-oracle: $(VENV)/.installed-test
	$(BIN)/pytest -q -m oracle

# mypy checks the installed package, from outside the checkout: it cannot follow the mapping of
# formats/ to qtool.formats in the source tree.
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $$(mktemp -d) && $(ROOT)/$(BIN)/mypy --config-file $(ROOT)/pyproject.toml --strict -p qtool

# For development: the library in build/, where a checkout looks for it.
kernels:
	cmake -S . -B build -DQTOOL_WERROR=ON >/dev/null
	cmake --build build

test-sanitize: $(VENV)/.installed-test
	cmake -S . -B build/sanitize -DQTOOL_WERROR=ON -DQTOOL_SANITIZE=ON >/dev/null
	cmake --build build/sanitize
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 QTOOL_LIBRARY=$(ROOT)/build/sanitize/libqtool_kernels.so \
		$(BIN)/pytest -q tests/test_native*.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(PIP) install -q -c constraints.txt .
	@touch $@

$(VENV)/.installed-test: $(SOURCES) | $(BIN)/python
	$(PIP) install -q -c constraints.txt '.[test]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	$(PIP) install -q -c constraints.txt '.[test,dev]'
	@touch $(VENV)/.installed $(VENV)/.installed-test $@

clean:
	rm -rf build out
