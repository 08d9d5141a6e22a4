"""The process of dry runs: reads a configuration from stdin, and writes its estimate to stdout as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from relibra.calibration.machine import find_cluster, preset_of_gpu
from relibra.cluster import Cluster
from relibra.errors import ConfigError, RelibraError
from relibra.planning.activation_choice import ActivationChoice
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step
from relibra.printable import plural
from relibra.rl.batch.training_batch import TrainingBatch
from relibra.rl.config.rules import broken_rules
from relibra.rl.config.run_config import RunConfig
from relibra.rl.memory.activation_memory import ActivationMemory
from relibra.rl.memory.dry_run import cut_layers, dry_run, layers_to_run
from relibra.rl.memory.estimate import GIB, LAYERS, RESERVE, DryRun, Estimate, Peak, choose_estimate, extrapolate
from relibra.rl.memory.estimator import DeviceMemory, Help, with_setting, with_settings
from relibra.rl.memory.made_up_step import MICRO_BATCHES, MINI_BATCHES, make_up_step, response_lengths
from relibra.rl.memory.stand_ins import StandIns
from relibra.rl.model.policy import ModelStructure, read_model_config, read_structure
from relibra.rl.model.tokenizer import make_tokenizer
from relibra.rl.tasks.make import make_task
from relibra.rl.update.gradient_reduction import reduces_each_micro_batch

_LEVERS: tuple[tuple[str, Any], ...] = (
    ("update.activations", "recompute"),
    ("update.offload", "moments"),
    ("update.activations", "host"),
    ("rollout.engine", "vllm"),
    ("update.offload", "all"),
    ("lora.rank", 16),
)
"""Settings that save memory, those that cost least first."""
USUAL_BYTES = 79 * GIB
"""Memory of a GPU where none is named."""
RANKS_OF_A_NODE = 8
"""A run has nodes of so many ranks if it fills several, whatever `plan.cluster` says; other runs are one node."""


def estimate_run(config: RunConfig, stand_ins: StandIns, memory: DeviceMemory, *, whole: bool = False) -> Estimate:
    """Return the estimate of a run; nothing is loaded.

    whole   run all layers, instead of a few that are extrapolated
    """
    ranks, cluster, model_config = config.parallel.ranks, _cluster_of(config, memory), model_config_of(config)
    structure = read_structure(model_config, config.model, ranks, config.algorithm.replay)
    text = model_config.get_text_config()
    layers = text.num_hidden_layers
    has_copy = config.rollout.engine == "embedded"
    numbers = [layers] if whole else sorted(set(layers_to_run(model_config, structure)))
    unsharded_gradient_bytes = 0.0 if config.lora.rank else 4 * structure.other_parameters * (1 - 1 / ranks)
    each_micro_batch = reduces_each_micro_batch(int(unsharded_gradient_bytes), int(memory.nbytes or USUAL_BYTES))
    stand_ins.reduce_gradients(each_micro_batch=each_micro_batch)
    runs = [dry_run(config, cut_layers(model_config, n), cluster, stand_ins, has_copy=has_copy) for n in numbers]
    peaks = extrapolate(runs[0].device, runs[-1].device, (runs[0].layers, runs[-1].layers), layers)
    host = extrapolate(runs[0].host, runs[-1].host, (runs[0].layers, runs[-1].layers), layers)
    if config.rollout.engine == "embedded":
        peaks = with_cache(peaks, cache_of_rollout(config, text, ranks), stays=config.rollout.keeps_cache)
    activations, choice, saved_seconds = None, None, 0.0
    lengths, responses = response_lengths(config), config.rollout.responses_per_step / ranks
    if config.update.activations == "plan":
        batch, _ = make_up_step(config, structure, cluster, vocabulary=text.vocab_size)
        activations = _activation_memory(runs, peaks, layers, memory)
        beside_replica_slots = activations.beside_replica_slots(config.plan.memory_gib)
        peaks, choice = _with_activations(peaks, beside_replica_slots, batch, cluster, structure)
        saved_seconds = choice.seconds * responses / (len(lengths) * MICRO_BATCHES)
    offload = {way: _offloaded(runs, layers, way, config) for way in ("host", "device")}
    offload_seconds = max(offload.values()) / cluster.host.bytes_per_second  # both ways run at once
    kind = f"{text.model_type} of {plural(layers, 'layer')}"
    return Estimate(
        model=f"{config.model.path}, {kind}" if config.model.path else f"the built-in model, {kind}",
        ranks=ranks,
        tokens=sum(prompt + response - 1 for prompt, response in lengths),
        peaks=peaks,
        host_bytes=cluster.ranks_per_node * max((one.total for one in host), default=0.0),
        device_bytes=memory.nbytes,
        device_name=memory.name,
        offload_bytes=sum(offload.values()),
        offload_seconds=offload_seconds,
        host_available=memory.host,
        activations=None if activations is None else asdict(activations),
        choice=choice,
        added_seconds=config.update.epochs * (config.update.mini_batches * offload_seconds - saved_seconds),
    )


def estimate_by_plan(
    config: RunConfig, estimate: Callable[[RunConfig], Estimate], memory: DeviceMemory
) -> tuple[RunConfig, Estimate]:
    """Return the configuration of a run with the settings that a plan chooses, and the estimate of that run."""
    searched: dict[str, Sequence[Any]] = (
        {"update.offload": ("off", "moments")} if config.update.offload == "plan" else {}
    )
    if not config.update.micro_batch_tokens:
        searched["update.micro_batch_tokens"] = _micro_batch_sizes(config)
    sizes = searched.get("update.micro_batch_tokens", ())
    passes = {n: _seconds_of_passes(with_settings(config, {"update.micro_batch_tokens": n}), memory) for n in sizes}
    found = list[Estimate]()
    for values in product(*searched.values()):
        changed = with_settings(config, chosen := dict(zip(searched, values, strict=True)))
        one = estimate(changed)
        seconds = one.added_seconds + passes.get(changed.update.micro_batch_tokens, 0.0)
        found.append(replace(one, chosen=chosen, added_seconds=seconds))
    best = choose_estimate(found)
    return with_settings(config, best.chosen), best


def _micro_batch_sizes(config: RunConfig) -> list[int]:
    """Return sizes to choose from: one, two, four and eight of the longest responses, if a mini-batch has as many."""
    longest = config.rollout.max_prompt + config.rollout.max_response - 1
    responses = _responses_of_mini_batch(config)
    return [longest * number for number in (1, 2, 4, 8) if number == 1 or number <= responses]


def _seconds_of_passes(config: RunConfig, memory: DeviceMemory) -> float:
    """Return the seconds of the policy update of a step whose responses are all as long as allowed (label `model`)."""
    cluster, model_config = _cluster_of(config, memory), model_config_of(config)
    structure = read_structure(model_config, config.model, config.parallel.ranks, config.algorithm.replay)
    batch, _ = make_up_step(config, structure, cluster, vocabulary=model_config.get_text_config().vocab_size)
    if batch.demand is None or structure.shape is None:
        raise ConfigError("update.micro_batch_tokens=0 compares times of experts, and this model has none: set a size")
    plan = batch.plan or plan_step(batch.demand, cluster, balancer="static", expert=structure.shape.expert)
    micro_batches = config.update.mini_batches * math.ceil(
        _responses_of_mini_batch(config) / len(response_lengths(config))
    )
    return float(config.update.epochs * micro_batches * plan.predicted["total"] / MICRO_BATCHES)


def _responses_of_mini_batch(config: RunConfig) -> float:
    return config.rollout.responses_per_step / config.update.mini_batches / config.parallel.ranks


def _cluster_of(config: RunConfig, memory: DeviceMemory) -> Cluster:
    """Return the machine of a run, with flat dispatch."""
    ranks, name = config.parallel.ranks, config.plan.cluster
    per_node = RANKS_OF_A_NODE if ranks > RANKS_OF_A_NODE and ranks % RANKS_OF_A_NODE == 0 else ranks
    if name in ("auto", "measure") and memory.nbytes is not None:  # no GPU is visible here
        name = preset_of_gpu(memory.name)
    return replace(find_cluster(name, torch.device("cpu"), ranks, per_node), dispatch="flat")


def _activation_memory(
    runs: Sequence[DryRun], peaks: Sequence[Peak], layers: int, memory: DeviceMemory
) -> ActivationMemory:
    """Return what layers may keep; a layer beyond those of the dry runs is taken to be as its kind in the last run."""
    last, period = runs[-1], runs[-1].layers - runs[0].layers
    saved = [last.saved[n if n < last.layers else runs[0].layers + (n - last.layers) % period] for n in range(layers)]
    totals = {one.phase: one.total for one in peaks}
    room = None if memory.nbytes is None else (1 - RESERVE) * memory.nbytes
    return ActivationMemory(
        token_bytes_L=[of_token for of_token, _ in saved],
        token_slot_bytes_L=[of_token_slot for _, of_token_slot in saved],
        loss_bytes=totals["update"],
        layer_bytes=totals[LAYERS],
        token_slots=last.token_slots,
        room_bytes=room,
    )


def _with_activations(
    peaks: Sequence[Peak],
    activations: ActivationMemory,
    batch: TrainingBatch,
    cluster: Cluster,
    structure: ModelStructure,
) -> tuple[tuple[Peak, ...], ActivationChoice]:
    """Return the peaks, the update's with the activations that layers keep, and the choice of these activations."""
    assert batch.demand is not None, "routes are replayed"
    assert structure.shape is not None, "a model with experts has sizes"
    plan = batch.plan or StepPlan.static(batch.demand, cluster.topology)
    choice = activations.choose(plan, batch.demand, cluster, structure.shape)
    kept_LMR = activations.kept_LMR(choice.option_L, plan, batch.demand, structure.shape)
    kept = {"update": kept_LMR, LAYERS: kept_LMR[:-1]}  # `LAYERS` has the last layer's activations already
    of_update = []
    for one in peaks:
        if one.phase in kept:
            held = one.parts.get("activations", 0.0) + float(kept[one.phase].sum(axis=0).max())
            of_update.append(replace(one, phase="update", parts={**one.parts, "activations": held}))
    largest = max(of_update, key=lambda one: one.total)
    return tuple(largest if one.phase == "update" else one for one in peaks if one.phase != LAYERS), choice


def model_config_of(config: RunConfig) -> Any:
    """Return the configuration of the model of a run."""
    vocabulary = 0
    if not config.model.path:
        task = make_task(config.task, config.run.seed, 0)
        vocabulary = make_tokenizer(config.model.source, task.characters, config.task).vocab_size
    return read_model_config(config.model, vocabulary, config.rollout.least_head_dim)


def cache_of_rollout(config: RunConfig, text: Any, ranks: int) -> float:
    """Return bytes of keys and values of all responses that a rank decodes at once, at their longest."""
    responses = min(config.rollout.max_batch, -(-config.rollout.responses_per_step // ranks))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = 2 * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    if getattr(text, "kv_lora_rank", None):  # keys and values are kept per head, as attention reads them
        width = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    dtype = "float32" if config.lora.rank else config.model.dtype  # of merged weights
    of_token = text.num_hidden_layers * heads * width * getattr(torch, dtype).itemsize
    return float(responses * (config.rollout.max_prompt + config.rollout.max_response) * of_token)


def with_cache(peaks: tuple[Peak, ...], cache: float, *, stays: bool) -> tuple[Peak, ...]:
    """Return the peaks, that of the rollout with the cache of the engine.

    stays   after the first rollout the cache is there in all phases; evaluations (phase rollout) have one beside it
    """
    bytes_of = {one.phase: stays * cache for one in peaks if one.phase != "load"}
    bytes_of["rollout"] = (1 + stays) * cache
    return tuple(
        replace(
            one,
            parts={**one.parts, "cache": bytes_of[one.phase]},
            line="engine/kv_cache.py" if one.phase == "rollout" else one.line,
        )
        if bytes_of.get(one.phase)
        else one
        for one in peaks
    )


def _offloaded(runs: Sequence[DryRun], whole: int, way: str, config: RunConfig) -> float:
    """Return the bytes that an optimizer step of a model of `whole` layers copies to the host, or to the device."""
    first, last = runs[0], runs[-1]
    micro_batches = max(1.0, _responses_of_mini_batch(config) / len(response_lengths(config)))
    total, of_step = 0.0, 1 / config.update.mini_batches
    phases = {"optimizer": 1 / MINI_BATCHES, "update": micro_batches / MICRO_BATCHES}
    phases |= {"values": of_step, "update values": 1 / MINI_BATCHES, "reference": of_step}
    for phase, times in phases.items():
        few, more = (run.traffic.get(f"{phase} to {way}", 0) for run in (first, last))
        each = (more - few) / max(1, last.layers - first.layers)
        total += times * (few + each * (whole - first.layers))
    return total


def _helping(config: RunConfig, before: Estimate, estimate: Callable[[RunConfig], Estimate]) -> Iterator[Help]:
    """Yield settings that save device memory, if it does not suffice, each with all before it, until the run fits."""
    for name, value in _LEVERS if before.peak.total > before.usable_bytes else ():
        changed = with_setting(config, name, value)
        broken, broken_now = (len([*broken_rules(one)]) for one in (changed or config, config))
        if name != "rollout.engine" and broken > broken_now:
            continue  # it breaks a rule; an engine may break one, as the server's address is not known here
        after = before if changed is None else estimate(changed)
        saves = before.peak.total - after.peak.total
        if changed is not None and (saves >= GIB / 10 or after.fits):
            yield Help(setting=f"{name}={str(value).lower()}", saves=saves, fits=after.fits)
            config, before = changed, after
        if after.fits:
            return


def main() -> None:
    """Answer one request: the estimate of a run, and what helps where it does not fit."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    request = json.load(sys.stdin)
    try:
        config = RunConfig.model_validate(request["config"])
        stand_ins, memory = StandIns(config.parallel.ranks), DeviceMemory(**request["memory"])
        estimate = partial(estimate_run, stand_ins=stand_ins, memory=memory)
        config, found = estimate_by_plan(config, partial(estimate, whole=request["whole"]), memory)
        helps = [] if found.fits else [asdict(one) for one in _helping(config, found, estimate)]
        answer: dict[str, Any] = {"estimate": found.as_json(), "helps": helps}
    except RelibraError as error:
        answer = {"error": str(error)}
    with out:
        json.dump(answer, out)
    os._exit(0)  # nobody waits for peers that were never there
