# Every target works on a bare machine with Python >= 3.11, a C compiler and make: what is missing
# goes into .venv. The package is installed as users install it (not editable), so that the tests
# see what the wheel carries, and again only when a source has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Of thousands of modules a few are used: Python compiles these when they are first imported.
INSTALL := $(PIP) install -q --no-compile -c constraints.txt
SOURCES := pyproject.toml CMakeLists.txt constraints.txt \
	$(shell find qtool formats kernels recipes -type f -not -path '*/__pycache__/*' 2>/dev/null)
DEMO := out/tiny-w4g128-awq
ROOT := $(CURDIR)
# The tests are small matrices; threads of a BLAS only stand in each other's way.
export OMP_NUM_THREADS ?= 1
# Each of the tests' processes imports the same modules: they are compiled once.
unexport PYTHONDONTWRITEBYTECODE

# Of fuzz-kernels; of fuzz-readers for each reader; of test-aarch64 and test-sanitize for each kernel
# and block type.
SECONDS ?= 600
TASKS ?= 16
KERNEL_TESTS = tests/kernels/test_native*.py

.PHONY: demo test test-long long-tests test-slow test-oracle test-sanitize test-aarch64 test-clang \
	test-wheel test-sdist fuzz-kernels fuzz-readers lint docs kernels cuda-kernels cuda-ptx \
	cuda-ptx-short gpu-check wheel clean

demo: $(VENV)/.installed
	rm -rf $(DEMO)
	$(BIN)/qtool quantize tiny --recipe w4g128-awq -o $(DEMO)
	$(BIN)/qtool inspect $(DEMO)

# By as many processes as there are processors, of four at most.
PYTEST := $(BIN)/pytest -q -n auto --maxprocesses 4 --dist worksteal
DEFAULT := not slow and not oracle and not gpu
test: $(VENV)/.installed-test
	$(PYTEST) -m "not long and $(DEFAULT)"

# Those of tests/long.txt, which long-tests writes anew by the times that they take.
test-long: $(VENV)/.installed-test
	$(PYTEST) -m "long and $(DEFAULT)"

long-tests: $(VENV)/.installed-test
	rm -f out/times.xml
	$(PYTEST) -o junit_duration_report=call --junit-xml=out/times.xml \
		--deselect tests/project/test_long_tests.py::test_those_that_are_listed_are_there
	$(BIN)/python tests/support/long_tests.py out/times.xml

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

# The pages of docs/ that are made from the program itself.
docs: $(VENV)/.installed-test
	$(BIN)/python docs/generate.py

# For development: the library in build/, where a checkout looks for it. WERROR=OFF where a compiler
# is newer than those of CI.
WERROR ?= ON
kernels:
	cmake -S . -B build -DQTOOL_WERROR=$(WERROR) >/dev/null
	cmake --build build -j $$(getconf _NPROCESSORS_ONLN)

# Every CUDA kernel for every architecture, warnings being errors; fails where registers spill.
# ARCHS="90 100" compiles for those alone; then each with NVRTC, as on a GPU machine.
cuda-kernels: $(VENV)/.installed $(VENV)/.installed-nvrtc
	$(BIN)/python tests/cuda/compile.py $(ARCHS)

# The kernels' own tests, of what NVRTC makes of them for ARCH, which a machine written in numpy runs
# (tests/support/ptx). cuda-ptx-short: every kernel as sm_90 has it, with fewer kinds of weights for those
# that encode or round; and those whose code is another on sm_75, with fewer of those that round,
# numbers of vectors and widths of words.
ARCH ?= sm_90
PTX = QTOOL_TEST_DEVICE=ptx $(PYTEST)
PTX_TESTS := $(wildcard tests/cuda/test_cuda_*.py) tests/cuda/test_ptx_kernels.py
PTX_SHORT := test_cuda_dequantize or test_cuda_gemv or test_ptx_kernels or \
	(test_cuda_tried and (compile or (near and [1-1))) or (test_cuda_encode and \
	(sums or several or (float16 and not bfloat16-IQ) or (cpus and not IQ))) or \
	test_cuda_round or (test_cuda_quantize and (test_odd or test_any_levels or Q4_K or \
	True-True-True or (test_groups and ([2- or [4- or [8-))))
PTX_SM_75 := (test_cuda_dequantize and not (test_words and not (-3 or -4))) or test_scales or \
	(test_cuda_gemv and not ([2- or [3- or [4- or [5- or [6- or [7-))
cuda-ptx: $(VENV)/.installed-test $(VENV)/.installed-nvrtc
	QTOOL_TEST_ARCH=$(ARCH) $(PTX) $(PTX_TESTS)
cuda-ptx-short: $(VENV)/.installed-test $(VENV)/.installed-nvrtc
	QTOOL_TEST_ARCH=sm_90 $(PTX) $(PTX_TESTS) -k "$(PTX_SHORT)"
	QTOOL_TEST_ARCH=sm_75 $(PTX) $(addprefix tests/cuda/test_cuda_,dequantize.py gemv.py quantize.py) \
		-k "$(PTX_SM_75)"

# On a machine with a GPU: everything built, compared with the CPU, run under compute-sanitizer
# where there is one, and timed; a short table last.
gpu-check: $(VENV)/.installed-test
	$(PIP) install -q -c constraints.txt '.[test,cuda]'
	$(BIN)/python tests/gpu/check.py

# What these need beyond a C compiler comes from the system's packages: named where it is missing.
# $(call need,program,package)
define need
@command -v $(1) >/dev/null || { echo "make $@ needs $(1): apt-get install $(2)" >&2; exit 1; }
endef

# The kernel tests, and random tasks for every kernel in memory that ends where the data does.
# Findings are written past pytest, which would lose them when the process ends.
test-sanitize: $(VENV)/.installed-test
	$(call need,cmake,cmake)
	$(call need,gcc,gcc)
	CC=gcc cmake -S . -B build/sanitize -DQTOOL_WERROR=ON -DQTOOL_SANITIZE=ON \
		-DQTOOL_DIGESTS=ON >/dev/null
	cmake --build build/sanitize
	build/sanitize/kernel_digests $(TASKS) >/dev/null
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 QTOOL_LIBRARY=$(ROOT)/build/sanitize/libqtool_kernels.so \
		$(BIN)/pytest -q --capture=sys $(KERNEL_TESTS)

# Random tasks for the kernels that unpack and dequantize, on every instruction set of this machine
# at once; what was interesting is kept in build/fuzz/corpus.
fuzz-kernels:
	$(call need,cmake,cmake)
	$(call need,clang,clang)
	@ls $$(clang -print-resource-dir)/lib/*/libclang_rt.fuzzer* >/dev/null 2>&1 || { \
		echo "make $@ needs clang's libFuzzer: apt-get install" \
			"libclang-rt-$$(clang -dumpversion | cut -d. -f1)-dev" >&2; exit 1; }
	CC=clang cmake -S . -B build/fuzz -DQTOOL_WERROR=ON -DQTOOL_SANITIZE=ON -DQTOOL_FUZZ=ON >/dev/null
	cmake --build build/fuzz
	mkdir -p build/fuzz/corpus
	build/fuzz/fuzz_kernels -max_total_time=$(SECONDS) -max_len=4096 -print_final_stats=1 \
		build/fuzz/corpus

# Inputs that lie, for one reader after the other; what failed is kept in build/readers. libFuzzer
# chooses them where atheris can be installed, chance where not. One reader: READERS=config.
READERS ?= gguf header index config recipe tokenizer stats journal remote
fuzz-readers: $(VENV)/.installed-test
	$(PIP) install -q atheris || echo "without atheris: lies by chance alone" >&2
	mkdir -p build/readers
	cd build/readers && guide=$$($(ROOT)/$(BIN)/python -c "import atheris" 2>/dev/null && echo --atheris); \
	for reader in $(READERS); do \
		program="fuzz_readers.py $$reader"; \
		if [ $$reader = gguf ]; then program=fuzz_gguf.py; fi; \
		$(ROOT)/$(BIN)/python $(ROOT)/tests/fuzz/$$program $$guide --seconds $(SECONDS) || exit 1; \
	done

# The same tasks here and, emulated, on aarch64: what the kernels make of them must not differ.
test-aarch64:
	$(call need,cmake,cmake)
	$(call need,aarch64-linux-gnu-gcc,gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
	$(call need,qemu-aarch64,qemu-user)
	cmake -S . -B build/here -DQTOOL_WERROR=ON -DQTOOL_DIGESTS=ON >/dev/null
	cmake --build build/here
	CC=aarch64-linux-gnu-gcc cmake -S . -B build/aarch64 -DQTOOL_WERROR=ON -DQTOOL_DIGESTS=ON \
		-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 >/dev/null
	cmake --build build/aarch64
	build/here/kernel_digests $(TASKS) >build/here/digests
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/kernel_digests $(TASKS) \
		>build/aarch64/digests
	diff build/here/digests build/aarch64/digests

# Without warnings, and to the same tests.
test-clang: $(VENV)/.installed-test
	$(call need,cmake,cmake)
	$(call need,clang,clang)
	CC=clang cmake -S . -B build/clang -DQTOOL_WERROR=ON >/dev/null
	cmake --build build/clang
	QTOOL_LIBRARY=$(ROOT)/build/clang/libqtool_kernels.so $(BIN)/pytest -q $(KERNEL_TESTS)

# `make wheel CC=clang`: into dist/, with the compiler that CC names.
wheel: | $(BIN)/python
	CC=$(CC) $(PIP) wheel -q --no-deps -w dist .

# Wheels of both compilers, unpacked; each quantizes as well on an emulated processor that has no
# AVX (numpy's own least is SSE 4.2) as on this one, and the kernels alone on the first x86-64.
test-wheel: $(VENV)/.installed
	$(call need,clang,clang)
	$(call need,qemu-x86_64,qemu-user)
	for cc in gcc clang; do \
		rm -rf build/wheel-$$cc && mkdir -p build/wheel-$$cc && \
		CC=$$cc $(PIP) wheel -q --no-deps -w build/wheel-$$cc . && \
		$(BIN)/python tests/kernels/baseline.py unpack build/wheel-$$cc/*.whl build/wheel-$$cc/site && \
		$(BIN)/python tests/kernels/baseline.py quantize build/wheel-$$cc/site >build/wheel-$$cc/here && \
		qemu-x86_64 -cpu Nehalem $(BIN)/python tests/kernels/baseline.py quantize build/wheel-$$cc/site \
			--isa scalar >build/wheel-$$cc/baseline && \
		diff build/wheel-$$cc/here build/wheel-$$cc/baseline && \
		$(CC) -O1 tests/fuzz/kernel_digests.c -o build/wheel-$$cc/digests \
			build/wheel-$$cc/site/qtool/libqtool_kernels.so -Wl,-rpath,'$$ORIGIN/site/qtool' && \
		build/wheel-$$cc/digests 4 >build/wheel-$$cc/here && \
		qemu-x86_64 -cpu qemu64 build/wheel-$$cc/digests 4 >build/wheel-$$cc/baseline && \
		diff build/wheel-$$cc/here build/wheel-$$cc/baseline || exit 1; \
	done

# A source distribution, a wheel made of it, and that wheel in an environment of its own where no
# compiler is on PATH. Its dependencies are those of .venv; DEPENDENCIES=install installs them anew.
SDIST := $(ROOT)/build/sdist
CLEAN := env -i PATH=$(SDIST)/venv/bin HOME=$(SDIST) HF_HUB_OFFLINE=1
test-sdist: $(VENV)/.installed
	rm -rf $(SDIST) && mkdir -p $(SDIST)
	$(PIP) install -q -c constraints.txt scikit-build-core
	$(BIN)/python -c "from scikit_build_core.build import build_sdist; build_sdist('$(SDIST)')"
	$(PIP) wheel -q --no-deps -w $(SDIST) $(SDIST)/qtool-*.tar.gz
	$(PYTHON) -m venv $(SDIST)/venv
ifeq ($(DEPENDENCIES),install)
	$(SDIST)/venv/bin/pip install -q -c constraints.txt $(SDIST)/qtool-*.whl
else
	$(SDIST)/venv/bin/pip install -q --no-deps $(SDIST)/qtool-*.whl
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		>"$$(echo $(SDIST)/venv/lib/python3*/site-packages)/dependencies.pth"
endif
	cd $(SDIST) && $(CLEAN) qtool --version && $(CLEAN) qtool doctor
	cd $(SDIST) && $(CLEAN) qtool quantize tiny --recipe w4g128-awq --samples 8 --length 64
	cd $(SDIST) && $(CLEAN) qtool verify tiny-w4g128-awq

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(INSTALL) .
	@touch $@

$(VENV)/.installed-test: $(SOURCES) | $(BIN)/python
	$(INSTALL) '.[test]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-nvrtc: constraints.txt | $(BIN)/python
	$(INSTALL) cuda-core cuda-bindings nvidia-cuda-nvrtc && touch $@ || \
		echo "without cuda-core: NVRTC is not checked" >&2

# The extra `dev` alone: with the package before it, that would be built once more.
DEV = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"])
$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(INSTALL) $$($(BIN)/python -c '$(DEV)')
	@touch $@

clean:
	rm -rf build out
