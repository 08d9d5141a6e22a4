"""The error of an invalid body: one field, what it holds, and what it may hold."""

import json

import pytest
from pydantic import ValidationError

from relibra.serving.server.bodies import ChatBody, CompletionBody, TokenBody
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
        (CompletionBody, {"prompt": [3], "top_p": 2}, "top_p", "2", "1"),
        (CompletionBody, {"prompt": [3], "stop": 7}, "stop", "7", " or "),
        (CompletionBody, {"prompt": [3], "stop": [""]}, "stop[0]", '""', "1"),
        (CompletionBody, {"prompt": [3], "stream": "perhaps"}, "stream", '"perhaps"', "boolean"),
        (CompletionBody, {"prompt": [3], "n": 1.5}, "n", "1.5", "integer"),
        (CompletionBody, {"prompt": [3], "n": 129}, "n", "129", "128"),
        (CompletionBody, {"prompt": [3], "stream_options": 1}, "stream_options", "1", "object"),
        (CompletionBody, [], "the body", "[]", "object"),
        (ChatBody, {}, "messages", "missing", ""),
        (ChatBody, {"messages": [MESSAGE, {}]}, "messages[1].role", "missing", ""),
        (
            ChatBody,
            {"messages": [MESSAGE | {"content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            '"image_url"',
            "'text'",
        ),
        (TokenBody, {"token_ids": []}, "token_ids", "[]", "1"),
        (TokenBody, {"token_ids": [3, -4]}, "token_ids[1]", "-4", "0"),
        (
            TokenBody,
            {"token_ids": [3], "sampling_params": {"max_tokens": 0}},
            "sampling_params.max_tokens",
            "0",
            "1",
        ),
        (WorkerCall, {"method": "reload_weights"}, "kwargs", "missing", ""),
        (WorkerCall, {"method": "m", "kwargs": {}}, "kwargs.weights_path", "missing", ""),
    ],
    ids=str,
)
def test_an_error_names_field_value_and_limit(kind, body, field, got, limit):
    found = error_of(kind, body)
    assert found.startswith(f"{field} is {got}")
    assert limit in found.partition(got)[2]
    assert len(found) < 400


def test_fields_that_are_not_offered_are_named():
    assert error_of(CompletionBody, {"prompt": [3], "min_p": 0.1}).startswith("min_p is not offered")
    nested = {"token_ids": [3], "sampling_params": {"min_p": 0.1}}
    assert error_of(TokenBody, nested).startswith("min_p is not offered")


def test_many_wrong_entries_make_one_error_per_kind_of_list():
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": [*range(10_000), None]})
    assert caught.value.error_count() < 10
