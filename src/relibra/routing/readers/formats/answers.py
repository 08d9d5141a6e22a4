"""Read answers of served engines: JSON, or JSON lines with one answer each.

engine       released version      routes
vLLM         0.29, 0.33            choices[].routed_experts: base64 of an .npy [n-1, all decoder layers, K]; around 0.21
                                   also prompt_routed_experts beside choices, the rows of the prompt
SGLang       0.5.23                meta_info.routed_experts, or sglext.routed_experts beside the only choice: base64 of
                                   raw int32, shape not told
SkyRL        a956457 (2026-08-21)  choices[].routed_experts: {data, shape, dtype}
prime-rl     559b447 (2026-08-21)  choices[].routed_experts: {data, shape, dtype, start}
NeMo-RL      7ea279a (2026-08-22)  choices[].message.routed_experts, or response.output[].routed_experts of NeMo Gym:
                                   "nrlre1:<dtype>:<rows>x<layers>x<choices>:<base64>"; -1: missing; row n-1 a filler
Megatron     d98e8a6 (2026-08-22)  choices[].moe_topk_indices: nested lists [n-1, MoE layers, K]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relibra.errors import TraceError
from relibra.routing.readers.encodings.excerpts import excerpt
from relibra.routing.readers.encodings.json_text import JsonDocument, iterate_documents
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample
from relibra.routing.readers.formats.wire_routes import decode_raw_int32, decode_routes


def read_answers(path: Path, rules: ImportRules) -> Iterator[RoutedSample]:
    """Yield the samples of a file of answers.

    rules     `top_k` and `recorded_layers` are needed for answers of SGLang
    raises    TraceError for a damaged file, and for an answer without routes or without the number of its tokens
    """
    for document in iterate_documents(path):
        answers = document.value if isinstance(document.value, list) else [document.value]
        for place, answer in enumerate(answers):
            where = document.where if answers is not document.value else f"{document.where}, answer {place}"
            if not isinstance(answer, Mapping):
                raise TraceError(f"{where} is {type(answer).__name__}: expected an answer, a JSON object")
            yield from _samples(where, answer, document, rules)


def _samples(
    where: str, answer: Mapping[str, Any], document: JsonDocument, rules: ImportRules
) -> Iterator[RoutedSample]:
    """Yield the samples of one answer."""
    if isinstance(answer.get("meta_info"), Mapping):
        yield _sglang(where, answer["meta_info"], document, rules)
    elif isinstance(answer.get("choices"), list):
        for place, choice in enumerate(answer["choices"]):
            if not isinstance(choice, Mapping):
                raise TraceError(f"{where}, choice {place} is {type(choice).__name__}: expected an object")
            yield _choice(f"{where}, choice {place}", answer, choice, document, rules)
    elif isinstance(answer.get("response"), Mapping) and isinstance(answer["response"].get("output"), list):
        yield from _gym(where, answer["response"]["output"], document)
    else:
        raise TraceError(
            f"{where} has {sorted(map(str, answer))[:12]}: expected an answer with 'choices' (vLLM, SkyRL, prime-rl, "
            "Megatron), 'meta_info' (SGLang) or 'response.output' (NeMo Gym)"
        )


def _choice(
    where: str, answer: Mapping[str, Any], choice: Mapping[str, Any], document: JsonDocument, rules: ImportRules
) -> RoutedSample:
    """Return the sample of one choice."""
    beside = _mapping(answer, "sglext") or _mapping(answer, "sgl_ext")
    prompt, tokens = _token_counts(where, answer, choice)
    if beside.get("routed_experts") is not None:
        if len(answer["choices"]) > 1:
            raise TraceError(
                f"{where}: routes stand beside {len(answer['choices'])} choices: ask for one answer each (n=1)"
            )
        ids = decode_raw_int32(where, beside["routed_experts"], document, *_shape(where, rules))
        return RoutedSample(where=where, ids_TLK=ids, tokens=tokens, prompt_tokens=prompt)
    message = _mapping(choice, "message")
    held = [one for one in (choice.get("routed_experts"), message.get("routed_experts")) if one is not None]
    if choice.get("moe_topk_indices") is not None:
        held.append(choice["moe_topk_indices"])
    if not held:
        raise TraceError(
            f"{where} has no routes: start the server with --enable-return-routed-experts (Megatron: "
            "--moe-enable-routing-replay)"
        )
    if len(held) > 1:
        raise TraceError(f"{where} has routes twice, in the choice and in its message: keep one of them")
    ids = decode_routes(where, held[0], document)
    if answer.get("prompt_routed_experts") is not None:
        before = decode_routes(f"{where}: prompt", answer["prompt_routed_experts"], document)
        if before.shape[1:] != ids.shape[1:]:
            raise TraceError(f"{where}: rows of the prompt have shape {before.shape}, those of the answer {ids.shape}")
        ids = np.concatenate([before, ids])
    start = _whole(where, "start", held[0].get("start", 0)) if isinstance(held[0], Mapping) else 0
    return RoutedSample(
        where=where,
        ids_TLK=ids,
        tokens=tokens,
        start=start,
        prompt_tokens=prompt,
        last_absent=_is_nrlre(held[0], document),
    )


def _token_counts(where: str, answer: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens of the prompt, and of prompt and answer together."""
    message, usage = _mapping(choice, "message"), _mapping(answer, "usage")
    lists = [choice, message, answer]
    prompt = next((len(one["prompt_token_ids"]) for one in lists if _is_list(one, "prompt_token_ids")), None)
    if prompt is None and usage.get("prompt_tokens") is not None:
        prompt = _whole(where, "usage.prompt_tokens", usage["prompt_tokens"])
    keys = ("token_ids", "generation_token_ids")
    new = next((len(one[key]) for one in lists[:2] for key in keys if _is_list(one, key)), None)
    if new is None and len(answer["choices"]) == 1 and usage.get("completion_tokens") is not None:
        new = _whole(where, "usage.completion_tokens", usage["completion_tokens"])
    if prompt is None or new is None:
        raise TraceError(
            f"{where} does not say how many tokens prompt and answer have: ask the server for token ids "
            "(return_token_ids=true), or for one answer per request"
        )
    return prompt, prompt + new


def _sglang(where: str, about: Mapping[str, Any], document: JsonDocument, rules: ImportRules) -> RoutedSample:
    """Return the sample of an answer of SGLang's /generate."""
    if about.get("routed_experts") is None:
        raise TraceError(
            f"{where} has no routes: start the server with --enable-return-routed-experts and ask with "
            "return_routed_experts=true"
        )
    prompt = _whole(where, "meta_info.prompt_tokens", about.get("prompt_tokens"))
    new = _whole(where, "meta_info.completion_tokens", about.get("completion_tokens"))
    version = str(about.get("weight_version", "0"))
    return RoutedSample(
        where=where,
        ids_TLK=decode_raw_int32(where, about["routed_experts"], document, *_shape(where, rules)),
        tokens=prompt + new,
        start=_whole(where, "meta_info.routed_experts_start_len", about.get("routed_experts_start_len") or 0),
        prompt_tokens=prompt,
        version=int(version) if version.isdecimal() and len(version) < 18 else 0,
    )


def _gym(where: str, outputs: list[Any], document: JsonDocument) -> Iterator[RoutedSample]:
    """Yield the last turn with routes of a NeMo Gym result: its rows cover the whole conversation."""
    turns = [one for one in outputs if isinstance(one, Mapping) and one.get("routed_experts") is not None]
    if not turns:
        raise TraceError(f"{where} has no turn with routes: set policy.router_replay.enabled=true")
    turn = turns[-1]
    if not _is_list(turn, "prompt_token_ids") or not _is_list(turn, "generation_token_ids"):
        raise TraceError(f"{where}: its last turn has no prompt_token_ids and generation_token_ids")
    prompt = len(turn["prompt_token_ids"])
    yield RoutedSample(
        where=f"{where}, last turn",
        ids_TLK=decode_routes(where, turn["routed_experts"], document),
        tokens=prompt + len(turn["generation_token_ids"]),
        prompt_tokens=prompt,
        last_absent=True,
    )


def _shape(where: str, rules: ImportRules) -> tuple[int, int]:
    """Return layers and choices of formats without a shape."""
    if rules.recorded_layers is None or rules.top_k is None:
        raise TraceError(
            f"{where}: SGLang does not say the shape of routes: give --recorded-layers (all decoder layers of the "
            "model, num_hidden_layers) and --top-k (num_experts_per_tok)"
        )
    return rules.recorded_layers, rules.top_k


def _is_nrlre(value: Any, document: JsonDocument) -> bool:
    text = document.text(value)
    return text is not None and bytes(text[:7].encode() if isinstance(text, str) else text[:7]) == b"nrlre1:"


def _mapping(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}


def _is_list(value: Mapping[str, Any], key: str) -> bool:
    return isinstance(value.get(key), list)


def _whole(where: str, what: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise TraceError(f"{where}: {what} is {excerpt(value)}: expected a whole number")
    return value
