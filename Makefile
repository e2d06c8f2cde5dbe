# Without a target, make installs the package and what its tests need in .venv. The others do so by themselves: slow
# the first time, a second afterwards.
#   TORCH='torch==2.11.0 numpy==2.3.*' make test     another torch; the interpreter of its Triton needs that NumPy
.DEFAULT_GOAL := .venv/built
PYTHON ?= python3
TORCH  ?= torch==2.13.0
BIN    := .venv/bin
CSRC   := $(shell find csrc -type f)
CPP    := $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Tests run in as many processes as there are cores, a whole file in each, so that what the tests of a file share
# is made once. The conftest.py gives each process one thread and lets the files with slow tests begin first. A
# crash in C++ ends the run: pytest-xdist would start another process and then wait for the crashed one for ever.
# Python keeps the compiled tests, also where the environment says that it shall not: to rewrite the assertions of all
# files takes each process ten seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart=0

.PHONY: docs test test-all processors bench emulate soak fuzz sanitize ports sdist hub wheel lists lint clean

# The site, in build/docs/html. It is built from docs/ and the docstrings, without the network, in an environment of its
# own, which has torch and what the site needs, and no extension.
docs: .venv-docs/ready
	.venv-docs/bin/python -m sphinx -W --keep-going -n -q -j auto -d build/docs/doctrees docs build/docs/html
	@echo "The site: $(abspath build/docs/html/index.html)"

# What one runs between two edits: a sample of every area. It leaves out the tests that are marked slow.
test: .venv/built
	$(PYTEST) -m "not slow"

# Every test, which is what each commit on main passes. It names those that take longest.
test-all: .venv/built
	$(PYTEST) --durations=25

# All tests as other processors compute them, before a release: with MKL's kernels that are the same everywhere, with
# AVX2, and with products by torch. An hour and a half.
processors: .venv/built
	MKL_CBWR=COMPATIBLE $(PYTEST)
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PYTEST)
	FASTQT_CPU_PRODUCTS=torch $(PYTEST)

# A quarter of an hour. Stores the run by machine and date, and renders the README from the newest one.
# What is ignored here stores runs of its own, as the docstrings say. A run on a machine that was not quiet is not
# rendered: nothing else may run.
RUN := benchmarks/results/$(shell uname -m)-$(shell getconf _NPROCESSORS_ONLN)-cores-$(shell date +%F).json
bench: .venv/built
	$(BIN)/python -m pytest --benchmark --benchmark-json $(RUN) benchmarks \
		--ignore benchmarks/bench_logistic.py \
		--ignore benchmarks/bench_torch_engine.py --ignore benchmarks/bench_matryoshka.py \
		--ignore benchmarks/bench_peak.py --ignore benchmarks/bench_splade.py \
		--ignore benchmarks/bench_false_negatives.py \
		--ignore benchmarks/bench_distributed.py
	$(BIN)/python -m benchmarks.render

# Every loss on Triton's kernels, executed from their PTX for two GPUs: in lockstep, with each warp alone, and in so
# many random orders. It fails where anything is reported. It takes hours of one processor.
ORDERS ?= 10
emulate: .venv/built
	$(BIN)/python -m tests.shared.emulated_losses 80 --orders $(ORDERS)
	$(BIN)/python -m tests.shared.emulated_losses 90 --orders $(ORDERS)

# A training that is killed and resumed so many times, and then one of so many minutes, whose memory, file
# descriptors and threads must stay flat.
KILLS ?= 100
soak: MINUTES ?= 120
soak: .venv/built
	$(BIN)/python -m benchmarks.soak --kills $(KILLS) --out benchmarks/results/soak-$(KILLS)-kills.json
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --out benchmarks/results/soak-$(MINUTES)-minutes.json

# The lists of all losses and filters, from their declarations and their sections in docs/losses: after one is new, or
# an option has changed. They are the export lists, the types of the loss modules, and what the documents list.
lists: .venv/built
	$(BIN)/python -m tests.shared.loss_lists
	$(BIN)/python -m tests.shared.option_lists

lint: .venv/built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.lint.structure

# The source distribution, in dist.
sdist: .venv/ready
	FASTQT_PURE=1 $(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'

# The losses as a repository of kernels for the Hugging Face hub, in build/hub.
hub: .venv/built
	rm -rf build/hub
	$(BIN)/python packaging/hub/layout.py build/hub

# One wheel for every Python and torch, in dist: with CUDA code where nvcc is found. What it links to is torch's.
wheel: .venv/built
	rm -rf build/wheel
	FASTQT_REQUIRE_EXTENSION=1 $(BIN)/pip wheel --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' \
		--wheel-dir dist build/wheel/*.whl
	$(BIN)/abi3audit --strict dist/*.whl
	@$(BIN)/python packaging/wheel_code.py dist/*.whl

# Every fuzz target for an equal share of the minutes, or until it finds something. The tests replay without atheris
# what was found.
FUZZED := checkpoint config contrastive_loss corpus evaluation tokenizer vectors vocabulary
fuzz: MINUTES ?= 10
fuzz: .venv/built
	$(BIN)/python -c 'import atheris' || $(BIN)/pip install --quiet 'atheris>=3'
	for target in $(FUZZED); do \
		$(BIN)/python -m tests.fuzz $$target -max_total_time=$$((60 * $(MINUTES) / 8)) || exit 1; done

# The extension under AddressSanitizer and UBSan, and on threads under ThreadSanitizer, in the tests of the CPU engine,
# the losses and the GRU. Several minutes.
sanitize: .venv/built
	$(BIN)/python -m pytest tests/csrc/cpu/test_sanitizers.py --sanitize-losses

# The C++ of the CPU engine, compiled for macOS and Windows by clang with the headers of both, which the package ziglang
# holds; and the losses and commands in a process without what the two systems lack. Several minutes; nothing for the two
# systems is run.
ports: .venv/built
	$(BIN)/python -c 'import ziglang' || $(BIN)/pip install --quiet ziglang
	$(BIN)/python -m pytest tests/csrc/test_other_compilers.py tests/test_other_systems.py

clean:
	rm -rf .venv .venv-docs build dist *.egg-info fastqt/*.so

# torch is pinned and comes first, so that no package chooses another. Where pip knows the index of torch's builds for
# CPUs, of this version it takes that build, which has no gigabytes of CUDA.
.venv/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH) numpy ninja 'setuptools>=77' wheel
	touch $@

# What the package needs but for Triton, which is larger than torch, and the extra `docs`.
DOCS_NEED := import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*(x for x in p["dependencies"] if x[:6] != "triton"), *p["optional-dependencies"]["docs"], sep="\n")
.venv-docs/ready: pyproject.toml setup.py
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet $(TORCH) numpy 'setuptools>=77' wheel
	.venv-docs/bin/python -c '$(DOCS_NEED)' > .venv-docs/requirements.txt
	.venv-docs/bin/pip install --quiet --requirement .venv-docs/requirements.txt
	FASTQT_PURE=1 .venv-docs/bin/pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

# The torch of .venv has no CUDA to use kernels with: they are compiled for wheels, or with FASTQT_CUDA_HOME set.
# An error in C++ ends it. FASTQT_PURE=1 make test is for a machine without a compiler. In the mode `compat` a path leads to
# the checkout, which type checkers and editors follow; by default an import hook does, which they do not.
.venv/built: .venv/ready setup.py $(CSRC)
	FASTQT_REQUIRE_EXTENSION=$(if $(filter 1,$(FASTQT_PURE)),0,1) FASTQT_CUDA_HOME="$(FASTQT_CUDA_HOME)" $(BIN)/pip install --quiet --no-build-isolation --config-settings editable_mode=compat --editable '.[dev]'
	touch $@
