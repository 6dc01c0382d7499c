# `make demo` and `make test` need only Python 3.11+, pip, make and git.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check slow docs bench quality clean

demo: $(INSTALLED)
	$(RUN)/bitfit demo

# One process per core with one thread each: the models of the tests are too small to share.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 2 --dist worksteal

check: $(INSTALLED)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

# About an hour on two cores. Servers and clusters run alone: they use all cores themselves.
ALONE := tests/test_serve_slow.py tests/test_deploy_slow.py tests/test_ray_slow.py
slow: $(INSTALLED)
	$(RUN)/python -m pip install --quiet -e ".[ray]"
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -m slow -n 2 --dist worksteal --timeout 3600 $(ALONE:%=--ignore %)
	$(RUN)/python -m pytest -m slow --timeout 3600 $(ALONE)

# The site in site/index.html; a broken link or reference is an error. It opens without a server.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict --quiet

bench: $(INSTALLED)
	$(RUN)/python -m pip install --quiet -e ".[bench]"
	$(RUN)/python benchmarks/bench.py

# Hours on one core; a result is kept as soon as it is there, so that it can be stopped and started.
quality: $(INSTALLED)
	$(RUN)/python benchmarks/quality.py run
	$(RUN)/python benchmarks/quality.py report

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --upgrade pip
	$(RUN)/python -m pip install --quiet -e ".[demo,serve,dev,docs]"
	touch $@

clean:
	rm -rf $(VENV) demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
