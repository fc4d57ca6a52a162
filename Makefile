# `make demo` and `make test` do everything on a fresh machine; called again, they work offline and skip what is done.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EDGE_PC := $(BIN)/edge-pc

# The demo keeps its states apart, so that it always begins without any; the model goes where `edge-pc` looks for it.
DEMO_STATES := .edge-pc-demo
DEMO_FILES := docs/demo/hostel.md
DEMO_ASK := $(EDGE_PC) ask --cache-dir $(DEMO_STATES) --max-tokens 48 --stats

.PHONY: demo test lint docs transcript bench bench-quick clean

demo: $(VENV)/.core
	@echo "== Getting SmolLM2-135M-Instruct (93 MB) and making an ONNX model of it; both are kept"
	@$(EDGE_PC) pull smollm2
	@$(EDGE_PC) export smollm2
	@rm -rf $(DEMO_STATES)
	@echo "== A first question about $(DEMO_FILES): its text is computed, and what was computed is stored"
	$(DEMO_ASK) "How many beds does the hostel have?" $(DEMO_FILES)
	@echo "== A second question, in a new process: only the question is computed"
	$(DEMO_ASK) "How high is the tower?" $(DEMO_FILES)
	@echo "== Ask about your own files:  $(EDGE_PC) ask \"What is this about?\" FILE..."

test: $(VENV)/.test
	$(BIN)/python -m pytest -q

# mypy finds the mapped folders (export, backends, schemas) only where they lie below edge_pc.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf build/lint && mkdir -p build/lint
	@cp -R edge_pc benchmarks build/lint/ && cp -R export backends schemas build/lint/edge_pc/
	cd build/lint && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

docs: $(VENV)/.plot
	$(BIN)/python docs/make_picture.py
	$(BIN)/python docs/make_cli_reference.py
	$(BIN)/python docs/make_results.py

# Real numbers for README.md: run it on a machine that does nothing else.
transcript: $(VENV)/.core
	@$(EDGE_PC) pull smollm2
	@$(EDGE_PC) export smollm2
	$(BIN)/python docs/make_transcript.py

# What is there already is not measured again: after Ctrl-C, `make bench` goes on. Accuracy needs data sets:
# make bench DATASETS="a.jsonl.gz b.jsonl.gz"
RESULTS ?= docs/results/here/report.json
DATASETS ?=

bench: $(VENV)/.bench
	@$(EDGE_PC) pull smollm2
	@$(EDGE_PC) export smollm2
	$(EDGE_PC) bench all --report $(RESULTS)
	$(BIN)/python -m benchmarks all --report $(RESULTS) $(DATASETS)
	$(EDGE_PC) bench report $(RESULTS)

bench-quick:
	@rm -rf build/bench-quick
	@EDGE_PC_QUICK=1 $(MAKE) bench RESULTS=build/bench-quick/report.json

clean:
	rm -rf $(VENV) $(DEMO_STATES) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

# A stamp is as new as the last installation: pip runs again only when pyproject.toml has changed.
$(VENV)/.core: EXTRAS :=
$(VENV)/.plot: EXTRAS := [plot]
$(VENV)/.test: EXTRAS := [test]
$(VENV)/.dev: EXTRAS := [dev]
# llama-cpp-python has no wheels: it is compiled, which takes some minutes.
$(VENV)/.bench: EXTRAS := [bench,llamacpp]
$(VENV)/.core $(VENV)/.plot $(VENV)/.test $(VENV)/.dev $(VENV)/.bench: pyproject.toml
	@echo "== Installing edge-prompt-cache$(EXTRAS) into $(VENV) (only when pyproject.toml has changed)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".$(EXTRAS)"
	@touch $@
