"""Passes of verl's Megatron engine on gloo processes, with relibra loaded as its `external_lib` and without.

Started by the interpreter of an environment that has verl (test_verl_package.py): `python -m
tests.integrations.verl.passes_at_work FOLDER OVERRIDES`. What runs is released code: the engine and its passes,
micro-batches, packing, replay and order of samples of verl; experts over gloo and schedules of Megatron-core.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from relibra.errors import EngineError
from tests.integrations.verl.engine_at_work import (
    EXPERTS,
    LIMIT,
    SAMPLES,
    Case,
    build_engine,
    loss_of,
    make_batch,
    use_the_host,
)

TIMEOUT_S = 120
CASES = {
    "four ranks": Case(4),
    "routes of the trainer": Case(4, mode="R2"),
    "tensor parallel": Case(4, tensor=2),
    "two stages": Case(4, stages=2),
    "one rank": Case(1),
    "no replay": Case(2, mode="disabled"),
}


class Watch:
    """What the engine's former of micro-batches returned last."""

    def __init__(self):
        from verl.workers.engine.megatron import transformer_impl

        self.module, self.former = transformer_impl, transformer_impl.prepare_micro_batches
        self.micro_batches = self.indices = None

    def __enter__(self):
        def watched(*arguments, **options):
            self.micro_batches, self.indices = self.former(*arguments, **options)
            return self.micro_batches, self.indices

        self.module.prepare_micro_batches = watched
        return self

    def __exit__(self, *_):
        self.module.prepare_micro_batches = self.former


def run_pass(engine, batch, *, forward_only=False):
    """Return the log-probs of verl's pass over the batch, gradients summed over ranks, and its micro-batches."""
    from megatron.core import parallel_state
    from verl.workers.utils.padding import no_padding_2_padding

    for parameter in engine.module[0].parameters():
        parameter.grad = None
    with Watch() as watch, torch.set_grad_enabled(not forward_only):
        output = engine.forward_backward_batch(batch, None if forward_only else loss_of, forward_only=forward_only)
    log_probs = []
    if output:  # on ranks of the last stage
        log_probs = [no_padding_2_padding(output["model_output"]["log_probs"], batch) * batch["response_mask"]]
    gradients = []
    for name, parameter in [] if forward_only else engine.module[0].named_parameters():
        groups = [engine.get_data_parallel_group()]
        if ".experts." in name:
            groups = [parallel_state.get_expert_data_parallel_group()]
        elif not getattr(parameter, "tensor_model_parallel", False):  # each rank has those of its part of the rows
            groups.append(parallel_state.get_tensor_model_parallel_group())
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for group in groups:
            dist.all_reduce(gradient, group=group)
        gradients.append(gradient.clone())
    return SimpleNamespace(output=output, log_probs=log_probs, gradients=gradients, watch=watch)


class Lines(logging.Handler):
    """What relibra logs in this process."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("relibra.verl").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())

    def taken(self):
        """Return the lines since the last call."""
        taken, self.lines = self.lines, []
        return taken


def check_micro_batches(watch, batch, *, unit=1):
    """Raise AssertionError where verl's conditions on micro-batches do not hold."""
    lengths = batch["input_ids"].offsets().diff().tolist()
    assert sorted(s for one in watch.indices for s in one) == list(range(SAMPLES))
    for part, samples in zip(watch.micro_batches, watch.indices, strict=True):
        assert samples
        assert sum(lengths[s] for s in samples) <= LIMIT
        assert samples == [s // unit * unit + k for s in samples[::unit] for k in range(unit)]
        for key in ("input_ids", "position_ids", "routed_experts"):
            for row, s in zip(part[key].unbind(), samples, strict=True):
                assert torch.equal(row, batch[key][s]), key
        assert torch.equal(part["response_mask"], batch["response_mask"][samples])
        assert part["max_token_len_per_gpu"] == LIMIT


def difference(a, b):
    return max((float((x - y).abs().max()) for x, y in zip(a, b, strict=True)), default=0.0)


def compare_passes(case, folder):
    """Return how passes with relibra differ from verl's own, in micro-batches, log-probs and gradients."""
    engine, lines = build_engine(case), Lines()
    batch = partial(make_batch, engine, calculate_entropy=True)
    if case.mode == "R2":  # the pass of log-probs records the routes of the update
        batch = partial(_with_routes, batch, run_pass(engine, batch(routes=False), forward_only=True))
    kinds = (False,) if case.mode == "R2" else (True, False)
    before = [run_pass(engine, batch(), forward_only=one) for one in kinds]
    load_as_external_lib(folder)
    lines.taken()
    after = [run_pass(engine, batch(), forward_only=one) for one in kinds]
    result = {"lines": lines.taken()}
    for one in after:
        check_micro_batches(one.watch, batch())
    check_micro_batches(run_pass(engine, batch(force_group_size=2)).watch, batch(), unit=2)
    pairs = list(zip(after, before, strict=True))
    result |= {
        "micro_batches": [[len(one.watch.indices) for one in pair] for pair in pairs],
        "as_in_verl": [a.watch.indices == b.watch.indices for a, b in pairs],
        "log_probs": max(difference(a.log_probs, b.log_probs) for a, b in pairs),
        "gradients": difference(after[-1].gradients, before[-1].gradients),
        "mean_log_prob": [float(one.mean()) for one in after[0].log_probs],
        "largest_gradient": max(float(one.abs().max()) for one in after[-1].gradients),
    }
    lines.taken()
    if case == CASES["four ranks"]:
        native = run_pass(engine, batch(enable_routing_replay=False), forward_only=True)
        result["without_replay"] = difference(native.log_probs, after[0].log_probs)
        result["lost"] = _where_one_fails(engine, batch)
        lines.taken()
        result["kept"] = {name: _kept(engine, batch, settings, lines) for name, settings in UNPLANNED.items()}
    return result


def _where_one_fails(engine, batch):
    """Return what each rank says of a pass whose routes one rank cannot read, and of the next pass."""
    from unittest import mock

    from relibra.integrations import verl

    said, own = [], dist.get_rank()
    for fails in (own == 1, False):
        broken = mock.patch.object(verl, "sample_routes", side_effect=KeyError("routed_experts"))
        with broken if fails else contextlib.nullcontext():
            try:
                run_pass(engine, batch(), forward_only=True)
                said.append("")
            except (KeyError, EngineError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


UNPLANNED = {
    "fixed number": {"use_dynamic_bsz": False},
    "no routes": {"routes": False},
    "reference": {"enable_routing_replay": False},
}


def _kept(engine, batch, settings, lines):
    """Return what is logged; raise AssertionError where such a pass has not verl's own micro-batches."""
    from verl.workers.engine.megatron import transformer_impl

    with Watch() as watch, contextlib.suppress(RuntimeError), torch.no_grad():  # verl's: replay without routes
        engine.forward_backward_batch(batch(**settings), None, forward_only=True)
    stock = transformer_impl.prepare_micro_batches.relibra_stock
    assert watch.micro_batches
    assert watch.indices == stock(batch(**settings), engine.get_data_parallel_group())[1]
    return lines.taken()


def _with_routes(make, recorded, **settings):
    batch = make(**{"routes": False, **settings})
    if settings.get("routes", True):
        batch["routed_experts"] = recorded.output["model_output"]["routed_experts"]
    return batch


def load_as_external_lib(folder):
    """Load relibra as a worker of verl does, from the configuration of its model."""
    from verl.workers.config import HFModelConfig

    HFModelConfig(path=str(folder / "model"), load_tokenizer=False, external_lib="relibra.integrations.verl")


def compose(overrides):
    """Return the values that the overrides of a command line set in verl's own configuration."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    keys = [override.split("=")[0] for override in overrides]
    return {key: OmegaConf.select(config, key) for key in keys}


def on_rank(rank, name, folder):
    torch.set_num_threads(1)
    case = CASES[name]
    meeting = f"file://{folder}/meeting of {name}".replace(" ", "-")
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=case.ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    result = compare_passes(case, folder)
    gathered = [None] * case.ranks
    dist.all_gather_object(gathered, result)
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(gathered, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def main(folder, overrides):
    warnings.simplefilter("ignore")
    use_the_host()
    import verl.workers.engine  # noqa: F401  (once, before ranks are forked)
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], num_experts=EXPERTS).save_pretrained(folder / "model")
    (folder / "configuration.json").write_text(json.dumps(compose(overrides)))
    for name, case in CASES.items():
        mp.start_processes(on_rank, args=(name, folder), nprocs=case.ranks, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
