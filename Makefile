# From nothing to results: `make bench`. Everything lives in $(VENV); nothing outside it is changed.

PYTHON ?= python3
VENV ?= .venv
# CI pins it (`make test TORCH=torch==2.13.0`). A torch that PYTHON already has is used as it is.
TORCH ?= torch>=2.6
# Options of the run: `make bench ARGS='--bs 1,64 --tp 4'`.
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: bench test lint perf clean
.DEFAULT_GOAL := bench
# Two installs at once would fight over the same site-packages.
.NOTPARALLEL:

bench: $(VENV)/.installed
	$(BIN)/attn-graph bench $(ARGS)

perf: $(VENV)/.installed
	$(BIN)/attn-graph perf $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# Keeps the environment and the results: both take long to get back.
clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find backends cli profilers tests tuning -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that is there is used as it is. A torch of PYTHON's own (an engine's container) must stay the one in use:
# `host` is the folder PYTHON imports it from, blank without one. --system-site-packages alone would miss a PYTHON that is
# a virtual environment itself, hence the .pth.
$(VENV)/.created:
	@set -e; test ! -x $(BIN)/python || exit 0; \
	host=$$($(PYTHON) -c "import importlib.util as u; s = u.find_spec('torch'); \
	    print(s.submodule_search_locations[0].rsplit('torch', 1)[0] if s else '')"); \
	echo "Creating $(VENV) with $$($(PYTHON) --version)$${host:+, using the torch in $$host}"; \
	$(PYTHON) -m venv $${host:+--system-site-packages} $(VENV); \
	site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); \
	test -z "$$host" || echo "$$host" > "$$site/host-torch.pth"
	@touch $@

# In its own step, so that the one large download is named; the constraint keeps every later step from replacing it.
$(VENV)/.torch: $(VENV)/.created
	@echo "Installing $(TORCH) unless it is there"
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install "$(TORCH)"
	$(BIN)/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(VENV)/constraints.txt
	@touch $@

# Editable, so only a change of the package's own description makes it stale.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install --constraint $(VENV)/constraints.txt --editable '.[gpu]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.torch pyproject.toml
	$(PIP) install --constraint $(VENV)/constraints.txt --editable '.[test]'
	@touch $@
