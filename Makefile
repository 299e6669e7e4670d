# `make demo` and `make test` need Python (3.10 or later, with venv) and make; each installs what it needs into .venv.
# `make gpu-test VENV=` installs nothing: PYTHON has what is needed.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all gpu-test cheats removals lint size docs report site wheel clean

demo: $(VENV)/installed
	$(BIN)/gpt2-infer --model demo --prompt "Once upon a time" --temperature 0.7 --top-p 0.9 --seed 7 --max-new-tokens 200

PYTEST := $(BIN)/python -m pytest -n $(shell nproc) --dist worksteal
# The quick tests: one case of each behaviour.
test: $(VENV)/installed
	$(PYTEST) -m "not slow and not gpu"

# And the slow ones, on the plainest vector instructions: no test may take torch's float32 for truth.
# Many wait for processes of their own, so one more runs than there are cores.
test-all: test
	ATEN_CPU_CAPABILITY=default $(PYTEST) -n $(shell expr $$(nproc) + 1) -m "slow and not gpu"

# For a machine without git, SOURCE_COMMIT is the commit. More workers would need more than 80 GB.
gpu-test: $(if $(VENV),$(VENV)/installed)
	$(if $(VENV),$(BIN)/python,$(PYTHON)) -m pytest -m gpu -n 16 --dist loadgroup \
		-p tests.gpu_suite --gpu-report=results/gpu_tests.json

# Every cheat and a hundred honest kernels; those that need a GPU where there is one.
cheats: $(if $(VENV),$(VENV)/installed)
	$(if $(VENV),$(BIN)/python,$(PYTHON)) -m pytest -n $(shell nproc) --dist worksteal \
		-p tests.cheat_suite --cheats-report=results/cheats.json \
		tests/attention_kernels/judge/test_cheats.py::test_a_cheat_is_caught \
		tests/attention_kernels/judge/hundred.py

# Each wait, fence and barrier of the newest kernels, removed in turn.
removals: $(VENV)/installed
	$(PYTEST) tests/gpt2_infer/engines/every_removal.py

# The constraints must have a solution on a plain index for every supported Python, not
# for this one alone.
RESOLVE := --quiet --no-config --no-build --universal --python-version 3.10 --all-extras --constraint constraints.txt
lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy
	$(BIN)/python scripts/size.py
	$(BIN)/uv pip compile $(RESOLVE) pyproject.toml > /dev/null

# Lines of code by room, against the limits in pyproject.toml.
size: $(VENV)/installed
	$(BIN)/python scripts/size.py

docs: $(VENV)/installed
	$(BIN)/cog -r -P README.md docs/*.md
	$(BIN)/python scripts/plot_results.py

# The float32 ladder, line by line, with its accesses, which take minutes to count.
report: $(VENV)/installed
	$(BIN)/gpt2-infer report --family fp32

# Needs Python 3.11. SITE_URL is where the site will be.
site: $(VENV)/installed
	$(BIN)/python scripts/make_site.py

# Needs nvcc 13. It compiles everything for every GPU; a second call only what has changed.
wheel: $(VENV)/installed
	$(BIN)/python scripts/make_wheel.py

# The constraints file pins what was tested; without it pip may fetch gigabytes of another torch.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev,site]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
