"""Read answers of served engines: JSON, or JSON lines with one answer each.

engine       released version      routes
vLLM         0.29, 0.33            choices[].routed_experts: base64 of an .npy [n-1, all decoder layers, K]; around 0.21
                                   also prompt_routed_experts beside choices, the rows of the prompt
SGLang       0.5.23                meta_info.routed_experts, or sglext.routed_experts beside the only choice: base64 of
                                   raw int32, without its shape
SkyRL        a956457 (2026-08-21)  choices[].routed_experts: {data, shape, dtype}
prime-rl     559b447 (2026-08-21)  choices[].routed_experts: {data, shape, dtype, start}
NeMo-RL      7ea279a (2026-08-22)  choices[].message.routed_experts, or response.output[].routed_experts of NeMo Gym:
                                   "nrlre1:<dtype>:<rows>x<layers>x<choices>:<base64>"; -1: missing; row n-1 a filler
Megatron     d98e8a6 (2026-08-22)  choices[].moe_topk_indices: nested lists [n-1, MoE layers, K]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import Raw, Struct
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.readers.encodings.json_text import Count, iterate_json, list_length
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample
from relibra.routing.readers.formats.wire_routes import decode_routes, decode_text, is_nrlre

_NULL = Raw(b"null")


class _Message(Struct):
    routed_experts: Raw = _NULL
    prompt_token_ids: Raw = _NULL
    token_ids: Raw = _NULL
    generation_token_ids: Raw = _NULL


class _Choice(_Message):
    message: _Message | None = None
    moe_topk_indices: Raw = _NULL


class _Usage(Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _MetaInfo(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    routed_experts: Raw = _NULL
    routed_experts_start_len: Count | None = None
    weight_version: str | int | None = None


class _Response(Struct):
    output: list[_Message]


class _Answer(Struct):
    meta_info: _MetaInfo | None = None
    choices: list[_Choice] | None = None
    response: _Response | None = None
    usage: _Usage | None = None
    sglext: _Message | None = None
    sgl_ext: _Message | None = None
    prompt_token_ids: Raw = _NULL
    prompt_routed_experts: Raw = _NULL


def read_answers(path: Path, rules: ImportRules) -> Iterator[RoutedSample]:
    """Yield the samples of a file of answers; `top_k` and `recorded_layers` are needed for those of SGLang."""
    for place, found in iterate_json(path, list[_Answer] | _Answer):
        for number, answer in enumerate(found if isinstance(found, list) else [found]):
            yield from _samples(f"{place}, answer {number}" if isinstance(found, list) else place, answer, rules)


def _samples(where: str, answer: _Answer, rules: ImportRules) -> Iterator[RoutedSample]:
    if answer.meta_info is not None:
        yield _sglang(where, answer.meta_info, rules)
    elif answer.choices is not None:
        for place, choice in enumerate(answer.choices):
            yield _choice(f"{where}, choice {place}", answer, choice, len(answer.choices), rules)
    elif answer.response is not None:
        yield _gym(where, answer.response.output)
    else:
        raise TraceError(
            f"{where} has neither 'choices' (vLLM, SkyRL, prime-rl, Megatron), 'meta_info' (SGLang) nor "
            "'response.output' (NeMo Gym): name a file of answers with one of these"
        )


def _choice(where: str, answer: _Answer, choice: _Choice, choices: int, rules: ImportRules) -> RoutedSample:
    """Return the sample of one choice of an answer that has `choices` of them."""
    message = choice.message or _Message()
    prompt, tokens = _token_counts(where, answer, choice, message, choices)
    beside = answer.sglext or answer.sgl_ext or _Message()
    if _is_there(beside.routed_experts):
        if choices > 1:
            raise TraceError(f"{where}: routes stand beside {choices} choices: ask for one answer each (n=1)")
        ids = _raw_int32(where, beside.routed_experts, rules)
        return RoutedSample(where=where, ids_TLK=ids, tokens=tokens, prompt_tokens=prompt)
    held = [*filter(_is_there, (choice.routed_experts, message.routed_experts, choice.moe_topk_indices))]
    if not held:
        raise TraceError(
            f"{where} has no routes: start the server with --enable-return-routed-experts (Megatron: "
            "--moe-enable-routing-replay)"
        )
    if len(held) > 1:
        raise TraceError(f"{where} has routes twice, in the choice and in its message: keep one of them")
    ids, start = decode_routes(where, held[0])
    if _is_there(answer.prompt_routed_experts):
        before, _ = decode_routes(f"{where}: prompt", answer.prompt_routed_experts)
        if before.shape[1:] != ids.shape[1:]:
            raise TraceError(f"{where}: rows of the prompt have shape {before.shape}, those of the answer {ids.shape}")
        ids = np.concatenate([before, ids])
    last_absent = is_nrlre(held[0])
    return RoutedSample(
        where=where, ids_TLK=ids, tokens=tokens, start=start, prompt_tokens=prompt, last_absent=last_absent
    )


def _token_counts(where: str, answer: _Answer, choice: _Choice, message: _Message, choices: int) -> tuple[int, int]:
    """Return the tokens of the prompt, and of prompt and answer together."""
    usage = answer.usage or _Usage()
    prompts = [list_length(one.prompt_token_ids) for one in (choice, message, answer)]
    new = [list_length(ids) for one in (choice, message) for ids in (one.token_ids, one.generation_token_ids)]
    prompt_tokens = next((one for one in (*prompts, usage.prompt_tokens) if one is not None), None)
    new_tokens = next((one for one in new if one is not None), usage.completion_tokens if choices == 1 else None)
    if prompt_tokens is None or new_tokens is None:
        raise TraceError(
            f"{where} does not say how many tokens prompt and answer have: ask the server for token ids "
            "(return_token_ids=true), or for one answer per request"
        )
    return prompt_tokens, prompt_tokens + new_tokens


def _sglang(where: str, about: _MetaInfo, rules: ImportRules) -> RoutedSample:
    """Return the sample of an answer of SGLang's /generate."""
    if not _is_there(about.routed_experts):
        raise TraceError(
            f"{where} has no routes: start the server with --enable-return-routed-experts and ask with "
            "return_routed_experts=true"
        )
    version = str(about.weight_version)
    return RoutedSample(
        where=where,
        ids_TLK=_raw_int32(where, about.routed_experts, rules),
        tokens=about.prompt_tokens + about.completion_tokens,
        start=about.routed_experts_start_len or 0,
        prompt_tokens=about.prompt_tokens,
        version=int(version) if version.isdecimal() and len(version) < 18 else 0,
    )


def _gym(where: str, outputs: list[_Message]) -> RoutedSample:
    """Return the last turn with routes of a NeMo Gym result: its rows cover the whole conversation."""
    turn = next((one for one in reversed(outputs) if _is_there(one.routed_experts)), None)
    if turn is None:
        raise TraceError(f"{where} has no turn with routes: set policy.router_replay.enabled=true")
    prompt, new = list_length(turn.prompt_token_ids), list_length(turn.generation_token_ids)
    if prompt is None or new is None:
        raise TraceError(f"{where}: its last turn has no prompt_token_ids and generation_token_ids")
    return RoutedSample(
        where=f"{where}, last turn",
        ids_TLK=decode_routes(where, turn.routed_experts)[0],
        tokens=prompt + new,
        prompt_tokens=prompt,
        last_absent=True,
    )


def _raw_int32(where: str, value: Raw, rules: ImportRules) -> ndarray:
    """Return `[rows, layers, choices]` from base64 of int32, whose shape the rules say."""
    layers, top_k = rules.recorded_layers, rules.top_k
    if layers is None or top_k is None:
        raise TraceError(
            f"{where}: SGLang does not say the shape of routes: give --recorded-layers (all decoder layers of the "
            "model, num_hidden_layers) and --top-k (num_experts_per_tok)"
        )
    flat = decode_text(where, value)
    if len(flat) % (4 * layers * top_k):
        raise TraceError(
            f"{where} has {len(flat):,} bytes: no multiple of 4 bytes x {layers} layers x {top_k} choices; check "
            "--recorded-layers (all decoder layers of the model) and --top-k"
        )
    return flat.view("<i4").reshape(-1, layers, top_k)


def _is_there(value: Raw) -> bool:
    return bytes(memoryview(value)[:5]) != b"null"
