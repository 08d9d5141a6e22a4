"""Plug-in of NeMo-RL: samples go into micro-batches, and on ranks, so that loads of experts are even.

`python -m relibra.integrations.nemo_rl examples/run_grpo.py ...` calls `install`, and then runs the script
(docs/guides/trainers.md). NeMo-RL cuts a batch in its driver, which holds the routes of router replay: `Policy` asks
`shard_by_batch_size`, and that asks a packer for bins, of which every data-parallel rank takes each n-th. The installed
packer calls that of NeMo-RL and exchanges samples between its bins. Where routes are missing, or no schedule can help,
the bins are returned as they are; the log says why, once for each reason.

Read and run: NeMo-RL 0.6.0 of 2026-08-22 (7ea279a). Megatron policies with sequence packing only.
"""

from __future__ import annotations

import functools
import importlib
import logging
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.errors import ConfigError, RelibraError, TraceError
from relibra.integrations.expert_layout import ExpertLayout
from relibra.integrations.hooks import WarnOnce, check_parameters, noting_calls, wrap_function
from relibra.integrations.repacking import RepackedStep, TrainerSchedule, count_samples, of_used_layers, repack_step

Bins = list[list[int]]

_log = logging.getLogger("relibra.nemo_rl")
_log.setLevel(logging.INFO)  # the level of NeMo-RL's root logger shows warnings only
_BATCHES = "nemo_rl.distributed.batched_data_dict"
_POLICY = "nemo_rl.models.policy.lm_policy"
_PACKER = ("algorithm", "bin_capacity", "collect_metrics", "min_bin_count", "bin_count_multiple")
_SHARD = ("self", "shards", "batch_size", "allow_uneven_shards", "dynamic_batching_args", "sequence_packing_args")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(eq=False)
class _PolicyBatch:
    """The batch that a policy cuts: one bin packing for each optimizer step, in the order of samples.

    taken   samples of the steps that are packed already
    """

    policy: Any
    data: Any
    what: str
    taken: int = 0

    def take(self, samples: int) -> slice:
        """Return the places of the samples of the next step."""
        self.taken += samples
        return slice(self.taken - samples, self.taken)


_current: ContextVar[_PolicyBatch | None] = ContextVar("relibra_nemo_rl_batch", default=None)
unplanned = WarnOnce(_log, "micro-batches of NeMo-RL are used as they are")


def install() -> None:
    """Make NeMo-RL's policies pack by recorded routes; a second call changes nothing.

    raises    EngineError where NeMo-RL's functions are not those that were read
    """
    batches, policy = importlib.import_module(_BATCHES), importlib.import_module(_POLICY)
    for owner, name, parameters in (
        (batches, "get_packer", _PACKER),
        (batches.BatchedDataDict, "shard_by_batch_size", _SHARD),
        (policy.Policy, "_shard_for_logprob", ("self", "data")),
        (policy.Policy, "_shard_for_train", ("self", "data", "batch_size")),
    ):
        check_parameters(owner, name, parameters, "NeMo-RL of August 2026")
    if not wrap_function(batches, "get_packer", _planned):
        return
    for name, what in (("_shard_for_logprob", "log-probs"), ("_shard_for_train", "update")):
        wrap_function(policy.Policy, name, noting_calls(functools.partial(_batch_of, what), _current))
    _log.info("relibra: micro-batches of NeMo-RL are packed by recorded routes")


def _batch_of(what: str, call: Mapping[str, Any]) -> _PolicyBatch:
    if not getattr(call["self"], "use_sequence_packing", False):
        unplanned.warn("micro-batches are not packed: set policy.sequence_packing.enabled=true")
    return _PolicyBatch(call["self"], call["data"], what)


def _planned(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_packer(
        algorithm: Any,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> Any:
        packer = stock(algorithm, bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)
        batch = _current.get()
        if batch is None:
            unplanned.warn(
                "a batch was packed apart from its routes: set data_plane.enabled=false (value models and teachers "
                "have no routes)"
            )
            return packer
        stock_pack = packer.pack

        @functools.wraps(stock_pack)
        def pack(sequence_lengths: list[int]) -> Bins:
            bins = stock_pack(sequence_lengths=sequence_lengths)
            since = time.perf_counter()
            samples = batch.take(len(sequence_lengths))
            try:
                repacked, step = repack_bins(
                    bins,
                    num_ranks=bin_count_multiple or 1,
                    layout=_layout(batch.policy),
                    routes=sample_routes(batch.data, samples),
                    padded_S=np.asarray(sequence_lengths, dtype=np.int64),
                    rank_tokens=bin_capacity,
                    since=since,
                )
            except RelibraError as error:
                unplanned.warn(str(error))
                return bins
            _log.info(step.line(batch.what))
            return repacked

        packer.pack = pack
        return packer

    return get_packer


def repack_bins(
    bins: Bins,
    *,
    num_ranks: int,
    routes: Sequence[Any],
    padded_S: Int64[ndarray, " S"],
    layout: ExpertLayout,
    rank_tokens: int,
    since: float,
) -> tuple[Bins, RepackedStep]:
    """Return as many bins with samples exchanged until loads of expert-parallel ranks are even.

    bins          samples of each; data-parallel rank r runs bins r, r + num_ranks, ... in this order
    routes        of every sample of the step: integers [tokens, layers, choices]
    padded_S      tokens of each sample, with the padding that it has in a bin
    rank_tokens   most tokens of a bin
    since         `time.perf_counter()` when work on this step began
    raises        TraceError where routes are missing or of another model
    """
    bin_S = np.full(len(padded_S), -1, dtype=np.int64)
    for number, samples in enumerate(bins):
        bin_S[samples] = number
    if len(routes) != len(padded_S) or len(bins) % num_ranks or (bin_S < 0).any():
        raise TraceError(
            f"{len(bins)} bins hold {int((bin_S >= 0).sum())} of {len(padded_S)} samples with {len(routes)} routes: "
            f"expected a multiple of {num_ranks} bins, and all samples"
        )
    length_S = np.array([len(route) for route in routes], dtype=np.int64)
    share_SLR, used_L = count_samples(routes, length_S, num_experts=layout.num_experts, num_ranks=layout.expert_ranks)
    step = repack_step(
        of_used_layers(share_SLR, used_L),
        padded_S,
        TrainerSchedule(
            micro_batch_S=(bin_S // num_ranks).astype(np.int32),
            rank_S=(bin_S % num_ranks).astype(np.int32),
            step_M=np.zeros(len(bins) // num_ranks, dtype=np.int32),
            num_ranks=num_ranks,
            group_ranks=layout.group_ranks,
        ),
        layout,
        rank_tokens=rank_tokens,
        since=since,
    )
    repacked_S = step.schedule.micro_batch_S.astype(np.int64) * num_ranks + step.schedule.rank_S
    return [np.flatnonzero(repacked_S == number).tolist() for number in range(len(bins))], step


def sample_routes(data: Any, samples: slice) -> list[ndarray]:
    """Return the routes of each token of these samples; raises TraceError where the batch has none."""
    if "routed_experts" not in data:
        raise TraceError("the batch has no routed_experts: set policy.router_replay.enabled=true")
    routes, lengths = data["routed_experts"][samples], data["input_lengths"][samples]
    return [routes[s, : int(length)].cpu().numpy() for s, length in enumerate(lengths)]


def _layout(policy: Any) -> ExpertLayout:
    """Return which ranks of a policy share experts.

    raises    ConfigError where a schedule would not help or not be kept, or the policy is not one of Megatron
    """
    config = policy.cfg
    megatron = config.get("megatron_cfg") or {}
    if not megatron.get("enabled", False):
        raise ConfigError("the policy is not trained by Megatron, and only its replay of routes was read")
    if (config.get("sequence_packing") or {}).get("microbatch_order") == "largest_first":
        raise ConfigError(
            "NeMo-RL sorts the micro-batches of each rank by tokens after they are packed: set "
            "policy.sequence_packing.microbatch_order=packer"
        )
    return ExpertLayout.of_megatron(
        _model_config(config["model_name"]),
        data_ranks=int(policy.data_parallel_size),
        parallel=SimpleNamespace(**megatron),
    )


@functools.cache
def _model_config(model_name: str) -> SimpleNamespace:
    """Return the sizes of a model under Megatron's names, from the Hugging Face configuration that NeMo-RL reads."""
    hub: Any = importlib.import_module("nemo_rl.utils.flops_tracker").get_default_hf_config(model_name)
    model = hub.get_text_config()
    latent = getattr(model, "kv_lora_rank", None) is not None
    return SimpleNamespace(
        num_moe_experts=next((getattr(model, name) for name in _EXPERTS if getattr(model, name, None)), None),
        hidden_size=model.hidden_size,
        num_layers=model.num_hidden_layers,
        moe_ffn_hidden_size=getattr(model, "moe_intermediate_size", None),
        ffn_hidden_size=getattr(model, "intermediate_size", None),
        num_attention_heads=model.num_attention_heads,
        kv_channels=getattr(model, "head_dim", None),
        multi_latent_attention=latent,
        qk_head_dim=getattr(model, "qk_nope_head_dim", None),
        qk_pos_emb_head_dim=getattr(model, "qk_rope_head_dim", None),
        v_head_dim=getattr(model, "v_head_dim", None),
    )


def main() -> None:
    """Run a script of NeMo-RL, the first argument, with the plug-in; the other arguments are the script's."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m relibra.integrations.nemo_rl examples/run_grpo.py [ARGUMENTS]")
    script = Path(sys.argv[1])
    if not script.is_file():
        raise SystemExit(f"{script} is not a file: give a script of NeMo-RL, such as examples/run_grpo.py")
    del sys.argv[0]
    sys.path[0] = str(script.parent.resolve())  # where a script is started, Python puts its folder first
    install()
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    importlib.import_module("relibra.integrations.nemo_rl").main()  # under its own name: the script is __main__ next
