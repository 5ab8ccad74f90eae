# Every target makes what it needs: `make demo` on a fresh machine with Python 3.9 to 3.11 and make
# creates .venv, installs into it, and runs. To start over: rm -rf .venv

PYTHON ?= $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
KERNELS := glm_multiuser/kernels/compiler.py $(wildcard glm_multiuser/kernels/cpu/*.[ch]pp)

CHECK_PYTHON = $(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 9) <= v <= (3, 11) or \
    sys.exit("MindSpore needs Python 3.9, 3.10 or 3.11, this is %d.%d; try make PYTHON=..." % v)'

TEST_OPTIONS = -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report= --durations=10

# Modules are compiled when they are first imported: most of them never are.
INSTALL = $(BIN)/python -m pip install -q --no-compile -c constraints.txt

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-all browser torch deploy notebooks coverage lint types bench selfcheck clean

help:
	@echo "make demo       many users at once, each answer compared with the one given alone"
	@echo "make serve      the server with its web page, on http://127.0.0.1:8000"
	@echo "make bench      speed for 1, 2, 4 ... users, as a table, a plot and a line of JSON"
	@echo "make selfcheck  the stored reference answers, on whatever device is there"
	@echo "make test       the tests; afterwards \`make coverage\` checks how much they covered"
	@echo "make test-all   those too that take long and prove the same at another size or version"
	@echo "make browser    Chromium for the tests of the web page, which are skipped without it (Debian, root)"
	@echo "make torch      PyTorch for the tests of pytorch_model*.bin, which are skipped without it"
	@echo "make deploy     Triton and Ray for the tests that need them, which are skipped without"
	@echo "make notebooks  runs the notebooks of examples/ anew and writes their outputs"
	@echo "make lint       ruff"
	@echo "make types      mypy --strict"
	@echo "make clean      removes what the other targets left, except .venv"

demo serve bench selfcheck: $(INSTALLED)
	@$(BIN)/glm-multiuser $@

test: $(INSTALLED)
	@$(BIN)/python -m pytest -m 'not rare' $(TEST_OPTIONS)

test-all: $(INSTALLED)
	@$(BIN)/python -m pytest $(TEST_OPTIONS)

browser:
	@command -v chromium > /dev/null || { echo "Installing Chromium and fonts ..." && \
	    apt-get update -qq && apt-get install -qq -y --no-install-recommends \
	    chromium fonts-noto-cjk > /dev/null; }

torch: $(INSTALLED)
	@$(BIN)/python -c 'import torch' 2> /dev/null || { echo "Installing PyTorch into .venv ..." && \
	    $(INSTALL) -e '.[torch]'; }

deploy: $(INSTALLED)
	@$(BIN)/python -c 'import pytriton, ray' 2> /dev/null || { echo "Installing Triton and Ray into .venv ..." && \
	    $(INSTALL) -e '.[triton,ray]'; }

notebooks: $(INSTALLED)
	@$(BIN)/python examples/notebooks/build.py

# Reads what `make test` measured.
coverage: $(INSTALLED)
	@$(BIN)/coverage report --include='glm_multiuser/engine/*,glm_multiuser/sampling*' --fail-under=95

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(INSTALLED)
	@$(BIN)/mypy

$(INSTALLED): setup.py pyproject.toml constraints.txt $(KERNELS)
	@test -x $(BIN)/pip || { $(CHECK_PYTHON) && \
	    echo "Creating .venv with $$($(PYTHON) --version) (some seconds) ..." && \
	    $(PYTHON) -m venv .venv; }
	@echo "Installing MindSpore and the rest into .venv (two minutes or more, mostly download) ..."
	@start=$$(date +%s) && $(INSTALL) -e '.[dev,server,mindformers]' && \
	    echo "Installed in $$(($$(date +%s) - start)) s."
	@touch $@

clean:
	@rm -rf build dist *.egg-info .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache \
	    rank_[0-9]* kernel_meta
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
