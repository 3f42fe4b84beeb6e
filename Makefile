# make demo, make test: all that a machine with Python >= 3.11 and make needs.
SHELL := /bin/bash
# containers set it: every process would compile every module again
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.gnnpar
PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 5 --dist worksteal
DEMO := outputs/demo
DEMO_JOB := model=gcn dataset=sbm world_size=2 epochs=50 fidelity_every=25

COMPARE := outputs/compare$(if $(QUICK),-quick)$(if $(STUDIES),-some)
REHEARSED := quick_speed quick_paced quick_accuracy quick_deep quick_cora

.PHONY: bench-peers dist demo compare studies test test-documents test-studies test-faults test-kernels test-all test-gpu-versions kills lint bench sparse docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo           a study of eight methods on the embedded dataset, two minutes: an answer, a table and report.html"
	@echo "                    (ALL=1: every strategy once)"
	@echo "make compare        every study that the decision table of experiments/README.md rests on, tables and figures in outputs/compare;"
	@echo "                    11.5 hours, the last 5.5 of a quiet machine; goes on where it was stopped"
	@echo "                    (QUICK=1: a rehearsal of ten minutes in outputs/compare-quick; STUDIES='speed cora': these of compare_all alone)"
	@echo "make studies        all other studies, in outputs/studies, likewise; experiments/study.py all rest --list says how long each takes"
	@echo "make test           the test suite, some cases of long tests, six minutes; no network, no GPU, no data"
	@echo "make test-kernels   the kernels, a package of its own: specification, CPU and Triton bodies, the latter interpreted"
	@echo "make test-documents README, tutorials, examples and site hold what they say; the wheel trains"
	@echo "make test-studies   tables and figures of experiments are rebuilt from their raw lines"
	@echo "make test-faults    kills, restarts, full disks, silent servers, broken files: a small part of each"
	@echo "make test-all       all of these plus what is long"
	@echo "make test-gpu-versions  kernels, communication and whole epochs under torch 2.11 for CUDA and Triton 3.6, without a GPU; 5 GB"
	@echo "make kills          runs of every strategy struck by signals, 15 times each; counts in outputs/kills.json, an hour or more"
	@echo "make lint           ruff, pyright, import contracts, pip-audit where it is installed and online"
	@echo "make bench          benchmarks for the hardware at hand"
	@echo "make bench-peers    epochs beside DGL 1.1.3, SAR, PyG and, with ISPLIB=PYTHON, iSpLib, which take turns; 30 minutes of a quiet machine. DGL gets .venv-dgl;"
	@echo "                    SAR=FOLDER is a checkout of its code, which no registry has; what cannot be had is named and left out"
	@echo "make dist           wheel and sdist in dist/, tried in a clean environment (TORCH=torch==2.10.0: with that one)"
	@echo "make docs           the documentation in site/, tables measured anew where the code changed (1 to 2 minutes); no warnings, links checked"
	@echo "make sparse         build the [sparse] extra against the installed torch (10 to 30 minutes)"

# pip writes into an environment which checkout it has
define CHECKOUT
import importlib.metadata as m, json, os, urllib.request as u
url = json.loads(m.distribution("gnnpar").read_text("direct_url.json") or "{}").get("url", "")
path = u.url2pathname(url.removeprefix("file://"))
if os.path.isdir(path) and not os.path.samefile(path, "."): print(path)
endef
export CHECKOUT
REFUSE_OTHER = other=$$($(BIN)/python -c "$$CHECKOUT" 2>/dev/null) || true; \
	  [ -z "$$other" ] || { echo "VENV=$(VENV) is the environment of $$other, and this checkout is another one: give another VENV"; exit 1; }

# the environment: made when missing, brought up to date when pyproject.toml changes
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gnnpar needs Python >= 3.11; call make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(REFUSE_OTHER)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(STAMP)
	rm -rf $(DEMO)
ifdef ALL
	$(BIN)/gnnpar train -m "strategy=glob(*)" $(DEMO_JOB) hydra.sweep.dir=$(DEMO)
	$(BIN)/gnnpar train strategy=graph_parallel codec=drop $(DEMO_JOB) hydra.run.dir=$(DEMO)/control
	$(BIN)/gnnpar compare $(DEMO) --html $(DEMO)/report.html --csv > $(DEMO)/table.csv
else
	$(BIN)/gnnpar study demo --folder $(DEMO)
endif

# from nothing: what outputs/compare holds is not run again
compare: $(STAMP)
ifeq ($(QUICK)$(STUDIES),)
	$(BIN)/python experiments/study.py all compare --out $(COMPARE)
else
	$(BIN)/python experiments/study.py run compare_all --folder $(COMPARE) $(if $(QUICK),$(REHEARSED),$(STUDIES)) || failed=$$?; \
	  $(BIN)/python experiments/study.py report compare_all $(if $(QUICK),--quick) --folder $(COMPARE) --page $(COMPARE) && \
	  exit $${failed:-0}
endif

studies: $(STAMP)
	$(BIN)/python experiments/study.py all rest --out outputs/studies

test: $(STAMP)
	$(PYTEST) -m "not slow and not gpu and not fault" --durations=10 --ignore tests/documents --ignore tests/studies \
	  --ignore tests/kernels

test-kernels test-documents test-studies: test-%: $(STAMP)
	$(PYTEST) --dist load -m "not slow and not gpu" --durations=5 tests/$*

test-faults: $(STAMP)
	$(PYTEST) --dist load -m "fault and not slow and not gpu" --durations=5 tests/api tests/cli tests/data tests/launch tests/track tests/training

test-all: $(STAMP)
	HYPOTHESIS_PROFILE=nightly $(PYTEST) --durations=20

# the versions of a GPU machine, beside those of $(VENV); Triton 3.6's interpreter fails with numpy 2.4
test-gpu-versions:
	test -x .venv-gpu/bin/python || { $(PYTHON) -m venv .venv-gpu && .venv-gpu/bin/python -m pip install --quiet \
	  "torch==2.11.0" "triton==3.6.0" "numpy<2.4" --editable ".[dev]"; }
	.venv-gpu/bin/python -m pytest -q -m "not gpu" tests/kernels tests/comm tests/conformance/test_synchronisation.py

kills: $(STAMP)
	mkdir -p outputs
	$(BIN)/python tests/kills.py --out outputs/kills.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	@found=$$($(BIN)/python -m pip_audit --local --progress-spinner off --timeout 4 2>&1); \
	  if grep -q "known vulnerabilit.* in" <<< "$$found"; then echo "$$found"; exit 1; fi; \
	  grep -q "No known vulnerabilit" <<< "$$found" || echo "pip-audit or its data are not at hand: not asked for known holes"

bench: $(STAMP)
	$(BIN)/python kernels/bench/run.py $(if $(shell command -v nvidia-smi),--device cuda)
	$(BIN)/python experiments/study.py run epoch_speed && $(BIN)/python experiments/study.py report epoch_speed

# DGL 1.1.3 is the last one whose wheel loads beside torch 2.13; `sar` on PyPI is another program
bench-peers: $(STAMP)
	test -x .venv-dgl/bin/python || $(PYTHON) -m venv .venv-dgl
	.venv-dgl/bin/python -m pip install --quiet "$(TORCH)" numpy scipy packaging "setuptools<81" pydantic pyyaml pandas ifaddr "dgl==1.1.3" \
	  || echo "DGL 1.1.3 cannot be installed here"
	$(if $(SAR),.venv-dgl/bin/python -m pip install --quiet --no-deps "$(SAR)" || echo "SAR cannot be installed from $(SAR)")
	$(BIN)/python experiments/study.py run bench_peers --dgl .venv-dgl/bin/python $(if $(ISPLIB),--isplib "$(ISPLIB)")
	$(BIN)/python experiments/study.py report bench_peers --folder outputs/bench_peers

sparse: $(STAMP)
	$(BIN)/python -m pip install --no-build-isolation "torch_scatter>=2.1.2" "torch_sparse>=0.6.18"

docs: $(STAMP)
	@$(REFUSE_OTHER)
	$(BIN)/python -c 'import mkdocs, material, mkdocstrings' 2>/dev/null || $(BIN)/python -m pip install --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html opens as it is; its search needs a server: $(BIN)/python -m http.server --bind 127.0.0.1 -d site"

# wheel and sdist, tried in an environment that has nothing else: TORCH names the torch in it (the oldest supported is 2.10)
dist: $(STAMP)
	rm -rf dist build/try build/from-sdist
	$(BIN)/python -m hatchling build
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/from-sdist dist/gnnpar-*.tar.gz
	cmp <($(BIN)/python -m zipfile -l dist/gnnpar-*.whl) <($(BIN)/python -m zipfile -l build/from-sdist/gnnpar-*.whl)
	$(PYTHON) -m venv build/try
	build/try/bin/python -m pip install --quiet "$(TORCH)"
	build/try/bin/python -m pip install --quiet dist/gnnpar-*.whl
	cd build/try && bin/gnnpar train debug=tiny world_size=2 hydra.run.dir=runs/two
	cd build/try && bin/gnnpar train debug=tiny strategy=single hydra.run.dir=runs/one
	cd build/try && bin/gnnpar compare runs --html report.html && bin/gnnpar cite strategy=adaqp
	@ls -l dist

clean:
	rm -rf build dist site outputs multirun .pytest_cache .ruff_cache .hypothesis .import_linter_cache
