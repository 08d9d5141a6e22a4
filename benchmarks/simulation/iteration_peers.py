"""Settings of peers in `relibra bench iteration`: what each does by default, and its fastest published setting.

Only passes, activations and rollouts ahead are taken from a peer; it runs on the simulated executor of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relibra.simulation.training_passes import Activations, OldLogProbs

READ = "read 2026-11"
"""When the repositories were read."""


@dataclass(frozen=True, kw_only=True)
class PeerSetting:
    """One setting of a peer.

    old_log_probs    of a step with several mini-batches; single: of one with one mini-batch
    moments          of AdamW: on the device, or stepped on the CPU, with the masters there
    whole_dense      every rank holds the weights outside of experts (Megatron); False: spread (FSDP)
    balancer         static: none; best: the fastest published one, which a user could add
    prompts          repeated; once: the peer shares them
    """

    name: str
    setting: Literal["default", "best"]
    old_log_probs: OldLogProbs
    single: OldLogProbs
    activations: Activations
    source: str
    ahead: int = 0
    moments: Literal["device", "cpu", "faster"] = "device"
    whole_dense: bool = False
    balancer: Literal["static", "best"] = "static"
    prompts: Literal["repeated", "once"] = "repeated"
    words: str = ""


def _peer(
    name: str,
    repository: str,
    default: tuple[OldLogProbs, OldLogProbs, Activations],
    best: tuple[OldLogProbs, OldLogProbs, Activations],
    words: tuple[str, str],
    *,
    ahead: tuple[int, int] = (0, 1),
    megatron: bool = True,
    moments: tuple[Literal["device", "cpu", "faster"], Literal["device", "cpu", "faster"]] = ("device", "faster"),
) -> list[PeerSetting]:
    """Return the default and the best setting: (several mini-batches, one, activations), and words of each."""
    settings: tuple[Literal["default", "best"], ...] = ("default", "best")
    return [
        PeerSetting(
            name=name, setting=setting, old_log_probs=passes[0], single=passes[1], activations=passes[2],
            source=f"{repository}, {READ}", ahead=steps, moments=place, whole_dense=megatron,
            balancer="best" if setting == "best" else "static", words=text,
        )
        for setting, passes, text, steps, place in zip(settings, (default, best), words, ahead, moments, strict=True)
    ]  # fmt: skip


PEER_SETTINGS: tuple[PeerSetting, ...] = (
    *_peer(
        "verl", "volcengine/verl", ("all", "all", "recomputed"), ("none", "none", "kept"),
        ("FSDP recomputes, old log-probs on", "bypass_mode, Megatron, some layers recomputed, fully_async"),
    ),
    *_peer(
        "TRL", "huggingface/trl 1.16", ("all", "all", "recomputed"), ("all", "none", "kept"),
        ("vLLM server with corrections", "no corrections: none where one optimizer step follows"),
        ahead=(0, 0), megatron=False, moments=("device", "device"),
    ),
    *_peer(
        "slime", "THUDM/slime", ("all", "none", "recomputed"), ("none", "none", "kept"),
        ("its Qwen3-30B script: all recomputed, optimizer on the host", "--use-rollout-logprobs, fully_async"),
        moments=("cpu", "faster"),
    ),
    *_peer(
        "NeMo-RL", "NVIDIA-NeMo/RL", ("all", "all", "kept"), ("none", "none", "kept"),
        ("activations kept", "force_on_policy_ratio, as its Qwen3-30B recipes; asynchronous"),
    ),
    *_peer(
        "prime-rl", "PrimeIntellect-ai/prime-rl", ("none", "none", "recomputed"), ("none", "none", "kept"),
        ("never computes them", "some layers recomputed"), ahead=(1, 1), megatron=False, moments=("device", "device"),
    ),
    *_peer(
        "AReaL", "inclusionAI/AReaL", ("none", "none", "recomputed"), ("none", "none", "kept"),
        ("off by default", "some layers recomputed"), ahead=(1, 1),
    ),
    *_peer(
        "ROLL", "alibaba/ROLL", ("none", "none", "recomputed"), ("none", "none", "kept"),
        ("off by default", "some layers recomputed, asynchronous"),
    ),
    *_peer(
        "SkyRL", "NovaSky-AI/SkyRL", ("all", "all", "recomputed"), ("none", "none", "recomputed"),
        ("its 30B script: all recomputed, to fit", "a loss that needs none; fully asynchronous"),
    ),
    *_peer(
        "MS-Swift", "modelscope/ms-swift", ("all", "all", "recomputed"), ("all", "all", "kept"),
        ("30B: all recomputed, to fit", "some layers recomputed"), ahead=(0, 0),
    ),
    PeerSetting(
        name="AReaL, tree training", setting="best", old_log_probs="none", single="none", activations="kept", ahead=1,
        moments="faster", whole_dense=True, balancer="best", prompts="once",
        source=f"inclusionAI/AReaL#804, {READ}", words="shares prompts; off in its MoE configurations",
    ),
)  # fmt: skip
"""Two rows per peer; one for a peer that can share prompts. ART shares them for MoE models too, but trains adapters."""
