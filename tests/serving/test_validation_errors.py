"""The error of an invalid body: one field, what it holds, and what it may hold."""

import json
from typing import get_args

import pytest
from pydantic import ValidationError

from relibra.serving.server.bodies import (
    HARMLESS,
    IGNORED,
    ChatBody,
    CompletionBody,
    StreamOptions,
    TokenBody,
    TokenSampling,
)
from relibra.serving.server.errors import validation_message
from relibra.serving.server.weights import WorkerCall

MESSAGE = {"role": "user", "content": "hello"}


def error_of(kind, data):
    data = json.dumps(data).encode()
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(data)
    return validation_message(caught.value, data)


@pytest.mark.parametrize(
    ("kind", "body", "field", "got", "limit"),
    [
        (CompletionBody, {}, "prompt", "missing", ""),
        (CompletionBody, {"prompt": 7}, "prompt", "7", " or "),
        (CompletionBody, {"prompt": {"a": "b" * 500}}, "prompt", '{"a": "bbb', ""),
        (CompletionBody, {"prompt": [3, 4, "five"]}, "prompt[2]", '"five"', "integer"),
        (CompletionBody, {"prompt": [[3, 4], [5, "six"]]}, "prompt[1][1]", '"six"', "integer"),
        (CompletionBody, {"prompt": [3], "temperature": -1}, "temperature", "-1", "0"),
        (CompletionBody, {"prompt": [3], "temperature": float("nan")}, "temperature", "NaN", "finite"),
        (CompletionBody, {"prompt": [3], "stop": [""]}, "stop[0]", '""', "1"),
        (CompletionBody, [], "the body", "[]", "object"),
        (ChatBody, {"messages": [MESSAGE, {}]}, "messages[1].role", "missing", ""),
        (
            ChatBody,
            {"messages": [MESSAGE | {"content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            '"image_url"',
            "'text'",
        ),
        (TokenBody, {"token_ids": [3, -4]}, "token_ids[1]", "-4", "0"),
        (
            TokenBody,
            {"token_ids": [3], "sampling_params": {"max_tokens": 0}},
            "sampling_params.max_tokens",
            "0",
            "1",
        ),
        (WorkerCall, {"method": "m", "kwargs": {}}, "kwargs.weights_path", "missing", ""),
    ],
    ids=str,
)
def test_an_error_names_field_value_and_limit(kind, body, field, got, limit):
    found = error_of(kind, body)
    assert found.startswith(f"{field} is {got}")
    assert limit in found.partition(got)[2]
    assert len(found) < 400


BODIES = {
    CompletionBody: {"prompt": [3]},
    ChatBody: {"messages": [MESSAGE]},
    TokenSampling: {},
    TokenBody: {"token_ids": [3]},
    StreamOptions: {},
}
SENT = {
    # what clients of OpenAI, vLLM and SGLang send, and who obeys it here
    "temperature": (0.5, SAMPLING := (CompletionBody, ChatBody, TokenSampling)),
    "top_p": (0.5, SAMPLING),
    "top_k": (3, SAMPLING),
    "n": (2, SAMPLING),
    "seed": (3, SAMPLING),
    "stop": ("x", SAMPLING),
    "stop_token_ids": ([3], SAMPLING),
    "ignore_eos": (True, SAMPLING),
    "skip_special_tokens": (False, SAMPLING),
    "include_stop_str_in_output": (True, SAMPLING),
    "return_token_ids": (True, SAMPLING),
    "return_tokens_as_token_ids": (True, SAMPLING),
    "return_routed_experts": (True, SAMPLING),
    "logprobs": (1, SAMPLING),
    "max_tokens": (3, SAMPLING),
    "stream_options": ({"include_usage": True}, (CompletionBody, ChatBody)),
    "max_completion_tokens": (3, (ChatBody,)),
    "top_logprobs": (3, (ChatBody,)),
    "add_generation_prompt": (False, (ChatBody,)),
    "continue_final_message": (True, (ChatBody,)),
    "chat_template_kwargs": ({"enable_thinking": False}, (ChatBody,)),
    "echo": (True, (CompletionBody,)),
    "add_special_tokens": (True, (CompletionBody,)),
    "prompt_logprobs": (0, (TokenSampling,)),
    "include_usage": (True, (StreamOptions,)),
}
REFUSED = {
    "truncate_prompt_tokens": 3,
    "bad_words": ["x"],
    "logits_processors": ["x"],
    "documents": [{"text": "x"}],
    "frequency_penalty": 0.1,
    "presence_penalty": -0.1,
    "repetition_penalty": 1.1,
    "length_penalty": 0.5,
    "logit_bias": {"3": 1},
    "min_p": 0.1,
    "min_tokens": 1,
    "best_of": 2,
    "suffix": "x",
    "use_beam_search": True,
    "response_format": {"type": "json_object"},
    "tools": [{}],
    "tool_choice": "required",
    "functions": [{}],
    "function_call": {"name": "x"},
    "modalities": ["text", "audio"],
    "reasoning_effort": "low",
    "continuous_usage_stats": True,
    "spaces_between_special_tokens": False,
    "priority": 1,
    "temprature": 0.5,
}


@pytest.mark.parametrize("kind", BODIES)
def test_every_field_that_changes_an_answer_is_obeyed_or_refused(kind):
    plain = kind.model_validate(BODIES[kind])
    for name, value in REFUSED.items():
        assert error_of(kind, BODIES[kind] | {name: value}).startswith(f"{name} is not offered"), name
        assert kind.model_validate(BODIES[kind] | {name: None}).model_dump(exclude={name}) == plain.model_dump()
    for name, (value, kinds) in SENT.items():
        body = BODIES[kind] | {name: value}
        if kind in kinds:
            assert name not in kind.model_validate(body).model_extra
        elif name not in kind.model_fields:
            assert error_of(kind, body).startswith(f"{name} is not offered"), name
    for name in IGNORED:
        assert getattr(kind.model_validate(BODIES[kind] | {name: "x"}), name) == "x"
    for name, values in HARMLESS.items():
        for value in values if name not in kind.model_fields else ():
            kind.model_validate(BODIES[kind] | {name: value})


@pytest.mark.parametrize("kind", BODIES)
def test_null_means_as_if_not_given(kind):
    plain = kind.model_validate(BODIES[kind])
    for name, field in kind.model_fields.items():
        if not field.is_required():
            data = json.dumps(BODIES[kind] | {name: None})
            value = getattr(kind.model_validate_json(data), name)
            assert value == getattr(plain, name) or (value is None and type(None) in get_args(field.annotation)), name


def test_nested_fields_are_obeyed_or_refused_too():
    nested = {"token_ids": [3], "sampling_params": {"min_p": 0.1}}
    assert error_of(TokenBody, nested).startswith("min_p is not offered")
    part = {"type": "text", "text": "x", "detail": "low"}
    assert "detail is not offered" in error_of(ChatBody, {"messages": [MESSAGE | {"content": [part]}]})
    assert error_of(CompletionBody, {"prompt": [3], "stream_options": {"x": 1}}).startswith("x is not offered")


def test_many_wrong_entries_make_one_error_per_kind_of_list():
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": [*range(10_000), None]})
    assert caught.value.error_count() < 10
