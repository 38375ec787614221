# make train   two processes learn to translate German: installs, trains, prints BLEU, draws
# make test    runs every test, one file per core at a time
# make verify  compares every strategy and layout with one plain process, and prints a table
# make lint    ruff and mypy
# make report  the runs of CMU 11-868, their figures, and one page that answers the assignment's questions (five minutes)
# make figures what make report makes, and all other runs and figures of submit_figures/
# make recipes trains GPT-2 by each small recipe, three minutes each on two cores; each file's head says which losses to expect
# make bench   every benchmark: a table each, and JSON files
# make gpu     what only a GPU can show, in under eight minutes: checks, races, memory, speed
# make chaos   kills, stops and interrupts real runs, and checks what they leave behind (30 minutes)
# make faults  kills, stops and cuts off ranks and hosts, and compares the weights (an hour; needs root)
# make fuzz    compares random models under random layouts with one plain process (five minutes)
# make mutants breaks one line at a time, some 900, and checks that a test sees each
# make docs    the site: pages of docs/, the tutorial and all docstrings, with search, in build/site
# make clean   removes what report, figures, bench, test and docs made; keeps .venv, and workdir/, where `make train` and
#              your own runs are

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Python keeps the bytecode that it compiles, whatever the environment says. Otherwise each process would
# compile torch again, which pip leaves to Python: see --no-compile below.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test verify lint report figures recipes bench gpu chaos faults fuzz mutants docs clean
.DELETE_ON_ERROR:

# --no-compile: Python compiles only what is imported, so the first output comes 20 seconds earlier.
$(VENV)/.installed: requirements.txt pyproject.toml
	@echo "Installing into $(VENV), which takes a minute or so"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -r requirements.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

# The model is named, since the default on a GPU is a larger one. Warm-up, decay and clipping allow a
# higher rate than the default. There is no dropout: eight epochs are too few for it.
RECIPE := --model gpt2-mini --learning_rate 2e-3 --warmup_steps 60 --lr_scheduler cosine --max_grad_norm 1 --dropout 0

train: $(VENV)/.installed
	$(RUN) project/run_data_parallel.py --world_size 2 $(RECIPE)

test: $(VENV)/.installed-dev
	$(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder

verify: $(VENV)/.installed-dev
	$(RUN) -m tests.equivalence

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The runs of the report. Each process has one core, each stage an equal share of all cores. A finished
# run is kept. `make report REPORT=small N_TRAIN=256 N_EPOCHS=3` makes smaller ones.
REPORT ?= workdir_report
N_TRAIN ?= 1536
N_EPOCHS ?= 4
FIGURES ?= submit_figures
COURSE = --model gpt2-mini --batch_size 128 --n_train $(N_TRAIN) --n_validation 100 --n_test 10 \
  --device cpu
LONG = $(COURSE) --n_epochs $(N_EPOCHS) --timeline 3 --keep 0
FLOW = $(LONG) --num_devices 2 --num_microbatches 8
GRADIENTS = $(REPORT)/gradients1/tests/model0_gradients.pth \
  $(REPORT)/gradients2/tests/model0_gradients.pth

.NOTPARALLEL:

$(REPORT)/dp1/summary.json $(REPORT)/dp2/summary.json: $(REPORT)/dp%/summary.json: | $(VENV)/.installed
	$(RUN) project/run_data_parallel.py $(LONG) --world_size $* --cores_per_rank 1 --workdir $(@D)

$(REPORT)/mp/summary.json: | $(VENV)/.installed
	$(RUN) project/run_pipeline.py $(FLOW) --model_parallel_mode model_parallel --workdir $(@D)

$(REPORT)/pp/summary.json: | $(VENV)/.installed
	$(RUN) project/run_pipeline.py $(FLOW) --model_parallel_mode pipeline_parallel --workdir $(@D)

# Gradients go to the folder tests/ of the current folder.
$(GRADIENTS): $(REPORT)/gradients%/tests/model0_gradients.pth: | $(VENV)/.installed
	mkdir -p $(@D)
	cd $(@D)/.. && $(abspath $(RUN)) $(CURDIR)/project/run_data_parallel.py $(COURSE) \
	  --num_batches 1 --pytest True --world_size $* --cores_per_rank 1 --workdir .

report: $(REPORT)/dp1/summary.json $(REPORT)/dp2/summary.json $(REPORT)/mp/summary.json \
  $(REPORT)/pp/summary.json $(GRADIENTS)
	$(RUN) project/plot.py training_time $(REPORT)/dp1 $(REPORT)/dp2 -o $(FIGURES)/data_parallel_training_time.png
	$(RUN) project/plot.py tokens_per_sec $(REPORT)/dp1 $(REPORT)/dp2 -o $(FIGURES)/data_parallel_throughput.png
	$(RUN) project/plot.py training_time $(REPORT)/mp $(REPORT)/pp -o $(FIGURES)/pipeline_training_time.png
	$(RUN) project/plot.py tokens_per_sec $(REPORT)/mp $(REPORT)/pp -o $(FIGURES)/pipeline_throughput.png
	$(RUN) project/plot.py training $(addprefix $(REPORT)/,dp1 dp2 mp pp) --output $(FIGURES)
	$(RUN) project/plot.py timeline $(REPORT)/dp2 --output $(FIGURES)
	$(RUN) project/plot.py timeline $(REPORT)/pp --output $(FIGURES)
	$(RUN) project/report.py $(addprefix $(REPORT)/,dp1 dp2 mp pp gradients1 gradients2) \
	  --template project/page/cmu_11868.html --output $(REPORT)/report.html

STEPS := --num_batches 9 --timeline 8 --keep 0 --device cpu
RUNS := ddp=1 ddp=2 fsdp=1 fsdp=2 model=2 pipeline=2 --workdir workdir_figures --output submit_figures

figures: report
	for n in 1 2; do for s in ddp fsdp; do \
	  $(RUN) project/train.py $$s $(STEPS) --world_size $$n --workdir workdir_figures/$$s$$n || exit; \
	done; done
	$(RUN) project/train.py model $(STEPS) --workdir workdir_figures/model2
	$(RUN) project/train.py pipeline $(STEPS) --workdir workdir_figures/pipeline2
	$(RUN) project/train.py 3d --dp 2 --pp 2 --tp 2 --model gpt2-mini --num_batches 6 \
	  --workdir workdir_figures/3d2x2x2
	$(RUN) project/plot.py schedule --schedule gpipe --num_devices 2 --n_chunk 4 --output submit_figures
	$(RUN) project/plot.py schedule --schedule 1f1b --output submit_figures
	$(RUN) project/plot.py split_time $(RUNS)
	$(RUN) project/plot.py throughput $(RUNS)
	$(RUN) project/plot.py memory ddp=2 fsdp=2 --workdir workdir_figures --output submit_figures
	for r in pipeline2 fsdp2 3d2x2x2; do \
	  $(RUN) project/plot.py timeline workdir_figures/$$r --output submit_figures || exit; \
	done
	$(MAKE) submit_figures/explore.png

# A picture of the page of report.py --explore, taken by a browser.
BROWSER ?= chromium
submit_figures/explore.png: project/page/* | $(VENV)/.installed
	mkdir -p workdir_figures
	$(RUN) project/report.py --explore --output workdir_figures/explore.html
	$(BROWSER) --headless --no-sandbox --hide-scrollbars --window-size=1100,780 --screenshot=$@ \
	  "file://$(CURDIR)/workdir_figures/explore.html#start=Beat+1F1B"

recipes: $(VENV)/.installed
	for recipe in examples/recipes/small_*.txt; do $(RUN) project/train.py @$$recipe || exit 1; done

bench: $(VENV)/.installed
	$(RUN) -m benchmarks

gpu: $(VENV)/.installed-dev
	$(RUN) -m tests.gpu
	$(RUN) -m benchmarks.gpu

chaos: $(VENV)/.installed-dev
	$(RUN) -m pytest -v tests/chaos/strikes.py

faults: $(VENV)/.installed-dev
	$(RUN) -m tests.faults

fuzz: $(VENV)/.installed-dev
	FUZZ=1500 $(RUN) -m pytest -q -x tests/fuzz

mutants: $(VENV)/.installed-dev
	$(RUN) -m tests.mutants

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(RUN) docs/site.py
	@echo "To read it: python3 -m http.server --directory build/site --bind 127.0.0.1, then http://127.0.0.1:8000"

clean:
	rm -rf workdir_report workdir_figures build *.egg-info .pytest_cache .mypy_cache .ruff_cache benchmarks/results
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
