# Every target makes what it needs: `make demo` on a fresh machine with Python 3.9 to 3.11 and make
# creates .venv, installs into it, and runs. To start over: rm -rf .venv

PYTHON ?= $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
CLIENTS := .venv-clients
KERNELS := glm_multiuser/backends/native/compiler.py $(wildcard glm_multiuser/backends/native/cpu/*.[ch]pp)

CHECK_PYTHON = $(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 9) <= v <= (3, 11) or \
    sys.exit("MindSpore needs Python 3.9, 3.10 or 3.11, this is %d.%d; try make PYTHON=..." % v)'

SMOLLM2 = ckpt/SmolLM2-135M-Instruct.Q4_1.gguf

AXE = axe-core@4.14.1

# Some tests wait for a browser or a server, so two cores have work for three.
TEST_OPTIONS = -n 3 --dist loadfile --no-loadscope-reorder --durations=10

# uv installs in a third of pip's time. It reads none of pip's settings: folders of wheels are passed
# on, and where uv fails, behind a mirror that only pip knows, pip installs.
WHEELS = $$($(BIN)/python -m pip config list | sed -n "s/^[^=]*\.find-links='\(.*\)'$$/\1/p" | \
    head -n 1 | sed 's/\\n/ /g; s/^ *//; s/  */,/g')
INSTALL = install() { \
    UV_SYSTEM_CERTS=1 UV_FIND_LINKS="$${UV_FIND_LINKS:-$(WHEELS)}" \
    $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt "$$@" || \
    $(BIN)/python -m pip install -q --no-compile -c constraints.txt "$$@"; }; install

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# What the first import compiled has to be kept: without it, MindSpore takes 4 s longer each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-real smollm2 serve check test test-all browser torch deploy clients notebooks \
    coverage lint types bench selfcheck wheel ascend-dryrun clean

help:
	@echo "make demo       many users at once, each answer compared with the one given alone"
	@echo "make demo-real  the same with SmolLM2-135M-Instruct, a real model, which is downloaded (98 MB)"
	@echo "make serve      the server with its web page, on http://127.0.0.1:8000"
	@echo "make bench      speed for 1, 2, 4 ... users, as a table, a plot and a line of JSON"
	@echo "make selfcheck  the stored reference answers, on whatever device is there"
	@echo "make check      ruff, mypy, and the tests that compile no graph"
	@echo "make test       the tests"
	@echo "make coverage   the tests, and how much of the package they cover: takes longer"
	@echo "make test-all   those too that take long and prove the same at another size or version"
	@echo "make smollm2    downloads that model for the tests on it, which are skipped without it"
	@echo "make browser    Chromium and axe-core for the tests of the web page, skipped without them (Debian, root)"
	@echo "make torch      PyTorch for the tests of pytorch_model*.bin, which are skipped without it"
	@echo "make deploy     Triton and Ray for the tests that need them, which are skipped without"
	@echo "make clients    LiteLLM, LangChain, LangGraph, AutoGen, instructor, Node's clients ask the server"
	@echo "make notebooks  runs the notebooks of examples/ anew and writes their outputs"
	@echo "make lint       ruff"
	@echo "make types      mypy --strict, of the tests, too"
	@echo "make wheel      the source archive and the manylinux wheel in dist/"
	@echo "make ascend-dryrun  compiles every graph for Ascend without a card, with libraries in CANN's place"
	@echo "make clean      removes what the other targets left, except .venv"

demo serve bench selfcheck: $(INSTALLED)
	@$(BIN)/glm-multiuser $@

smollm2: $(INSTALLED)
	@$(BIN)/python scripts/fetch_smollm2.py

demo-real: smollm2
	@$(BIN)/glm-multiuser demo --users 8 --checkpoint $(SMOLLM2) --prompts examples/prompts.txt

check: lint types
	@$(BIN)/python -m pytest -q --no-compile -m 'not slow and not rare' -n 2 --dist worksteal

test: $(INSTALLED)
	@$(BIN)/python -m pytest -m 'not rare' $(TEST_OPTIONS)

test-all: $(INSTALLED)
	@$(BIN)/python -m pytest $(TEST_OPTIONS)

browser:
	@command -v chromium-headless-shell > /dev/null || command -v chromium > /dev/null || { \
	    echo "Installing Chromium and fonts ..." && \
	    apt-get update -qq && apt-get install -qq -y --no-install-recommends \
	    chromium-headless-shell fonts-noto-cjk > /dev/null; }
	@test -e .browser/node_modules/axe-core || if command -v npm > /dev/null; then \
	    npm install --silent --no-audit --no-fund --ignore-scripts --prefix .browser $(AXE); \
	    else echo "There is no npm to install axe-core with: accessibility is not tested."; fi

torch: $(INSTALLED)
	@$(BIN)/python -c 'import torch' 2> /dev/null || { echo "Installing PyTorch into .venv ..." && \
	    $(INSTALL) -e '.[torch]'; }

deploy: $(INSTALLED)
	@$(BIN)/python -c 'import pytriton, ray' 2> /dev/null || { echo "Installing Triton and Ray into .venv ..." && \
	    $(INSTALL) -e '.[triton,ray]'; }

# They pin what .venv and each other pin otherwise, so they have environments of their own.
clients: $(INSTALLED) $(CLIENTS)/.installed
	@$(BIN)/python -m pytest -v tests/clients

$(CLIENTS)/.installed: $(wildcard tests/clients/requirements/*.txt)
	@echo "Installing clients into $(CLIENTS) (some minutes) ..."
	@for file in $^; do client=$(CLIENTS)/$$(basename $$file .txt) && \
	    $(PYTHON) -m venv $$client && $$client/bin/python -m pip install -q -r $$file || exit 1; done
	@if command -v npm > /dev/null; then npm install --silent --prefix $(CLIENTS) \
	    openai ai @ai-sdk/openai-compatible zod; fi
	@touch $@

notebooks: $(INSTALLED)
	@$(BIN)/python examples/notebooks/build.py

# MindSpore compiles portable_graphs.py; Python runs little of it.
coverage: TEST_OPTIONS += --cov --cov-report=
coverage: test
	@$(BIN)/coverage report --include='glm_multiuser/engine/*,glm_multiuser/sampling*' \
	    --omit='glm_multiuser/engine/portable_graphs.py' --fail-under=95
	@$(BIN)/coverage report

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(INSTALLED)
	@$(BIN)/mypy

wheel: $(INSTALLED)
	@rm -rf build dist
	@$(BIN)/python -m build -o build/archives .
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair -w dist build/archives/*.whl
	@mv build/archives/*.tar.gz dist

ascend-dryrun: $(INSTALLED)
	@$(BIN)/python -m scripts.ascend_dryrun

$(INSTALLED): setup.py pyproject.toml constraints.txt $(KERNELS)
	@test -x $(BIN)/uv || { $(CHECK_PYTHON) && \
	    echo "Creating .venv with $$($(PYTHON) --version) (some seconds) ..." && \
	    $(PYTHON) -m venv .venv && $(BIN)/python -m pip install -q -c constraints.txt uv; }
	@echo "Installing MindSpore and the rest into .venv (one to four minutes, mostly download) ..."
	@touch .venv/.started
	@# The kernels are compiled while uv downloads; what it builds finds them there.
	@start=$$(date +%s); $(BIN)/python -m glm_multiuser.backends.native.compiler & \
	    $(INSTALL) -e '.[dev,server,structured,hub,otel,mindformers]' && wait && \
	    echo "Installed in $$(($$(date +%s) - start)) s."
	@touch -r .venv/.started $@ # what was saved meanwhile is newer

clean:
	@rm -rf build dist *.egg-info .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache \
	    rank_[0-9]* kernel_meta
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
