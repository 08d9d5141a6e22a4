"""Router classes of `transformers` (5.24): which gate rule each follows, and which cannot be replayed.

Classes are looked up by name along the inheritance chain, because FSDP2 swaps in a subclass named `FSDP<Class>`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from relibra.replay.gates import (
    GateRule,
    floored_softmax_gates,
    rescaled_gates,
    score_gates,
    softmax_gates,
    topk_softmax_gates,
)

_NORM, _SCALE = "norm_topk_prob", "routed_scaling_factor"


def _rule(gates: Callable[..., Tensor], **settings: Any) -> Callable[[Any], GateRule]:
    """Return a function from a router to its gate rule; a setting that is a string names an attribute of the router."""

    def of(router: Any) -> GateRule:
        return partial(gates, **{k: getattr(router, v) if isinstance(v, str) else v for k, v in settings.items()})

    return of


RULES: dict[str, Callable[[Any], GateRule]] = {
    # softmax over all experts; checkpoints decide by `norm_topk_prob` whether the chosen ones are renormalised
    **dict.fromkeys(
        ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "Qwen3OmniMoeThinkerTextTopKRouter",
         "Qwen3OmniMoeTalkerTextTopKRouter", "Qwen4ExpTextTopKRouter", "OlmoeTopKRouter", "FlexOlmoTopKRouter",
         "MellumTopKRouter"),
        _rule(softmax_gates, norm=_NORM),
    ),
    **dict.fromkeys(
        ("Qwen3_5MoeTopKRouter", "Qwen3VLMoeTextTopKRouter", "Qwen3OmniMoeTextTopKRouter", "HunYuanMoEV1Gate",
         "MixtralTopKRouter", "MiniMaxTopKRouter"),
        _rule(softmax_gates, norm=True),
    ),
    "LaraMiniTopKRouter": _rule(softmax_gates, norm=_NORM, inner=None),
    "JambaTopKRouter": _rule(softmax_gates, norm=False),
    **dict.fromkeys(
        ("DeepseekV2TopkRouter", "DeepseekOcr2TextTopkRouter", "UnlimitedOcrTextTopkRouter"),
        _rule(softmax_gates, norm=False, scale=_SCALE),
    ),
    "LongcatFlashTopkRouter": _rule(softmax_gates, norm=False, scale=_SCALE, inner=None),
    "Mistral4TopkRouter": _rule(softmax_gates, norm=_NORM, eps=1e-20, scale=_SCALE, inner=None),
    "MistralLarge4TextTopkRouter": _rule(softmax_gates, norm=True, eps=1e-20, scale=_SCALE, inner=None),
    "Ernie4_5_MoeTopKRouter": _rule(floored_softmax_gates, floor="norm_min"),
    "Gemma4TextRouter": lambda router: partial(rescaled_gates, router=router),
    # softmax over the chosen logits only
    **dict.fromkeys(
        ("GptOssTopKRouter", "AriaTextTopKRouter", "GraniteMoeTopKRouter", "GraniteMoeSharedTopKRouter",
         "GraniteMoeHybridTopKRouter", "GraniteMoeSWATopKRouter"),
        _rule(topk_softmax_gates),
    ),
    "Cohere2MoeTopKRouter": lambda router: (
        partial(topk_softmax_gates, inner=torch.float32)
        if router.expert_selection_fn == "softmax"
        else partial(score_gates, norm=router.norm_topk_prob)
    ),
    # elementwise scores; a selection bias does not enter the weights
    **dict.fromkeys(
        ("DeepseekV3TopkRouter", "DeepseekV32TopkRouter", "Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter",
         "Glm4vMoeTextTopkRouter", "Glm5NextTextTopkRouter", "GlmMoeDsaTopkRouter", "KimiLinearTopkRouter",
         "NemotronHTopkRouter", "Dots1TopkRouter", "Dots3NoteTextTopkRouter", "ExaoneMoeTopkRouter",
         "SolarOpenTopkRouter", "MiMoV2FlashTopkRouter", "BailingHybridTopkRouter", "AXK1TopkRouter",
         "AXK2TopkRouter", "HYV4TopkRouter", "HYV4VLTopkRouter"),
        _rule(score_gates, norm=_NORM, eps=1e-20, scale=_SCALE),
    ),
    **dict.fromkeys(
        ("DeepseekV4TopKRouter", "Inkling2TopKRouter"),
        _rule(score_gates, norm=True, score="score_fn", eps=1e-20, scale=_SCALE),
    ),
    **dict.fromkeys(
        ("MiniMaxM2TopKRouter", "MiniMaxM3VLTopKRouter", "Step3p7TopKRouter"),
        _rule(score_gates, norm=True, inner=torch.float32),
    ),
    **dict.fromkeys(("FlintTopKRouter", "Kolibri1TopKRouter"), _rule(score_gates, norm=_NORM)),
    "AfmoeTokenChoiceRouter": _rule(score_gates, norm=True, eps=1e-20, scale="route_scale"),
    "BeamTopKRouter": _rule(score_gates, norm=_NORM, eps=1e-20),
    "HYV3TopKRouter": _rule(score_gates, norm=True, eps=1e-20, scale="router_scaling_factor"),
    "LagunaTopKRouter": _rule(score_gates, norm=True),
    "Lfm2MoeTopKRouter": _rule(score_gates, norm=_NORM, eps=1e-6, scale=_SCALE),
    "MuseSparkTopkRouter": _rule(score_gates, norm=True, eps="norm_topk_prob_eps", scale=_SCALE),
}  # fmt: skip
"""Router class -> its gate rule, with the settings of the router."""

REFUSED: dict[str, str] = {
    "PhimoeTopKRouter": "its sparsemixer weights depend on which expert came first and on noise",
    "Llama4Router": "it returns dense scores that scale the experts' input instead of weights and ids",
    "DeepseekV4HashRouter": "it looks experts up by token id, so there is no choice to replay",
    "InklingTopkRouter": "the weights of its shared experts depend on the routed choice too",
    "Inkling2LoopTopKRouter": "its loop layers route a token several times in one pass",
    "ZayaRouter": "it reports tokens that skip the experts as tokens of expert 0",
    "JetMoeTopKGating": "it returns tokens sorted by expert instead of ids",
    "DbrxRouter": "it returns logits only and the choice is made outside it",
    "Ernie4_5_VLMoeMoeTopKRouter": "it sees text and image tokens in separate calls, so its rows are not the batch's",
    "Dots3NoteVisionTopKRouter": "its rows are image patches",
    "DiffusionGemmaTextRouter": "a diffusion model routes a token many times",
    "SwitchTransformersTop1Router": "it drops tokens beyond an expert's capacity",
    "NllbMoeTop2Router": "it drops tokens beyond an expert's capacity",
}
"""Router class -> why replay refuses it."""
