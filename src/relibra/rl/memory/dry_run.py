"""The dry run: a step as rank 0 of a run makes it, on a device with shapes only.

A process makes its `StandIns`, and then any number of dry runs.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

from relibra.cluster import Cluster
from relibra.rl.config.run_config import RunConfig
from relibra.rl.memory.estimate import DryRun
from relibra.rl.memory.fake_mode import FakeDeviceMode
from relibra.rl.memory.made_up_step import make_up_step
from relibra.rl.memory.stand_ins import StandIns
from relibra.rl.memory.step_run import StepRun
from relibra.rl.model.policy import ModelStructure, read_structure


def cut_layers(model_config: Any, layers: int) -> Any:
    """Return a transformers configuration with fewer layers, its lists by layer cut to as many."""
    cut = copy.deepcopy(model_config)
    text = cut.get_text_config()
    whole = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == whole:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return cut


def layers_to_run(model_config: Any, structure: ModelStructure) -> tuple[int, int]:
    """Return how many layers the two dry runs have; equal numbers: one run of the whole model suffices.

    The first has the leading dense layers, then a period of the kinds of layers (two or more); the second two periods.
    """
    text = model_config.get_text_config()
    whole, kinds = text.num_hidden_layers, getattr(text, "layer_types", None) or []
    first = min(structure.layer_ids, default=0)
    later = kinds[first:]
    period = next((p for p in range(1, len(later)) if later[p:] == later[:-p]), 1)
    few = first + max(2, period)
    return (few, few + max(2, period)) if few + max(2, period) < whole else (whole, whole)


def dry_run(config: RunConfig, model_config: Any, cluster: Cluster, stand_ins: StandIns, *, has_copy: bool) -> DryRun:
    """Run two optimizer steps of a model, and what is around them; return what was counted.

    model_config   of transformers, with as many layers as shall run
    has_copy       a full copy of the policy is in the device memory
    """
    structure = read_structure(model_config, config.model, config.parallel.ranks, config.algorithm.replay)
    text = model_config.get_text_config()
    batch, routes = make_up_step(config, structure, cluster, vocabulary=text.vocab_size)
    mode = FakeDeviceMode(text.vocab_size, stand_ins.guess)
    stand_ins.mode, stand_ins.routes = mode, routes
    with mode:
        run = StepRun(config, model_config, structure, cluster, stand_ins.device, mode, has_copy=has_copy)
        run.steps(batch)
        device_peaks, host_peaks = mode.device.peaks(), mode.host.peaks()
    device_peaks.pop("", None)  # phase of the pass by which `StepRun` counts what layers save: no run makes it
    saved, token_slots = list(run.saved), run.token_slots
    stand_ins.routes = {}
    del run
    gc.collect()
    return DryRun(
        layers=text.num_hidden_layers,
        device=device_peaks,
        host=host_peaks,
        traffic=dict(mode.traffic),
        waits=[(one.kind, one.line, one.phase, one.inside, times) for one, times in mode.waits.items()],
        mixed=mode.mixed,
        saved=saved,
        token_slots=token_slots,
    )
