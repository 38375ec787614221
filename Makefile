# make train   two processes learn to translate German: installs, trains, prints BLEU, draws
# make test    every test
# make verify  every strategy and layout beside one plain process: a table
# make lint    ruff and mypy
# make figures the runs behind the pictures in submit_figures/, and the pictures
# make bench   every benchmark: one table, and JSON beside it
# make chaos   kills, stops and interrupts real runs, and looks at what is left (three quarters of an hour)
# make fuzz    random models under random layouts beside one plain process (five minutes)
# make clean   removes what the above made, but not .venv

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: train test verify lint figures bench chaos fuzz clean
.DELETE_ON_ERROR:

# --no-build-isolation would need setuptools in the environment; the default asks pip for it.
$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

train: $(VENV)/.installed
	$(RUN) project/run_data_parallel.py --world_size 2

test: $(VENV)/.installed
	$(RUN) -m pytest

verify: $(VENV)/.installed
	$(RUN) project/verify.py

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

figures: $(VENV)/.installed
	$(RUN) project/plot.py figures

bench: $(VENV)/.installed
	$(RUN) -m benchmarks

chaos: $(VENV)/.installed
	$(RUN) -m tests.chaos

fuzz: $(VENV)/.installed
	$(RUN) -m tests.fuzz

clean:
	rm -rf workdir workdir_* build *.egg-info .pytest_cache .mypy_cache .ruff_cache benchmarks/results
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
