"""What a refused body says: one field, what it holds, and what it may hold."""

import json

import pytest
from pydantic import ValidationError

from relibra.serving.server.endpoints.chat import ChatBody
from relibra.serving.server.endpoints.completions import CompletionBody
from relibra.serving.server.endpoints.mistakes import first_mistake
from relibra.serving.server.endpoints.tokens import TokenBody
from relibra.serving.server.weights import WorkerCall

MESSAGE = {"role": "user", "content": "hello"}


def said_of(kind, data):
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(data)
    return first_mistake(caught.value, data, kind)


@pytest.mark.parametrize(
    ("kind", "body", "field", "got", "allowed"),
    [
        (CompletionBody, {}, "prompt", "missing", ["a text", "a list of texts", "2147483647"]),
        (CompletionBody, {"prompt": 7}, "prompt", "7", ["a text", "a list of texts"]),
        (CompletionBody, {"prompt": {"a": "b" * 500}}, "prompt", '{"a": "bbb', ["a text"]),
        (CompletionBody, {"prompt": [3, 4, "five"]}, "prompt", '"five" as entry 2', ["a list of texts"]),
        (CompletionBody, {"prompt": [3], "temperature": -1}, "temperature", "-1", ["a number from 0 to 100"]),
        (CompletionBody, {"prompt": [3], "temperature": float("nan")}, "temperature", "NaN", ["from 0 to 100"]),
        (CompletionBody, {"prompt": [3], "top_p": 2}, "top_p", "2", ["a number above 0 and at most 1"]),
        (
            CompletionBody,
            {"prompt": [3], "stop": 7},
            "stop",
            "7",
            ["a text of 1 to 1024", "a list of at most 16 texts"],
        ),
        (CompletionBody, {"prompt": [3], "stop": [""]}, "stop", '[""]', ["a text of 1 to 1024 characters"]),
        (CompletionBody, {"prompt": [3], "stream": "perhaps"}, "stream", '"perhaps"', ["true or false"]),
        (CompletionBody, {"prompt": [3], "n": 1.5}, "n", "1.5", ["a whole number from 1 to 128"]),
        (CompletionBody, {"prompt": [3], "stream_options": 1}, "stream_options", "1", ["a JSON object"]),
        (CompletionBody, [], "the body", "[]", ["a JSON object with prompt"]),
        (ChatBody, {}, "messages", "missing", ["a list of 1 to 10000 JSON objects with role"]),
        (ChatBody, {"messages": [MESSAGE, {}]}, "messages[1].role", "missing", ["a text of 1 to 64 characters"]),
        (
            ChatBody,
            {"messages": [MESSAGE | {"content": [{"type": "image_url"}]}]},
            "messages[0].content",
            '[{"type": "image_url"}]',
            ["a text or a list of JSON objects with type and text"],
        ),
        (TokenBody, {"token_ids": []}, "token_ids", "[]", ["a list of at least 1 whole numbers"]),
        (TokenBody, {"token_ids": [3, -4]}, "token_ids[1]", "-4", ["a whole number from 0 to 2147483647"]),
        (
            TokenBody,
            {"token_ids": [3], "sampling_params": {"max_tokens": 0}},
            "sampling_params.max_tokens",
            "0",
            ["a whole number from 1 to 2147483647"],
        ),
        (WorkerCall, {"method": "reload_weights"}, "kwargs", "missing", ["a JSON object with weights_path"]),
        (WorkerCall, {"method": "m", "kwargs": {}}, "kwargs.weights_path", "missing", ["a text of 1 to 4096"]),
    ],
    ids=str,
)
def test_a_mistake_names_field_value_and_what_is_allowed(kind, body, field, got, allowed):
    said = said_of(kind, body)
    assert said.startswith(f"{field} is ")
    assert got in said
    assert all(words in said for words in allowed)
    assert len(said) < 400
    assert not any(word in said for word in ("Input should", "Value error", "constrained", "list[", ".str"))


def test_rules_of_ours_are_told_as_they_are():
    assert said_of(CompletionBody, {"prompt": [3], "min_p": 0.1}).startswith("min_p is not offered")
    nested = {"token_ids": [3], "sampling_params": {"min_p": 0.1}}
    assert said_of(TokenBody, nested).startswith("min_p is not offered")


@pytest.mark.parametrize("data", [b"", b"  ", b"{", b"\xff", b'{"prompt": 3', b"[" * 10_000])
def test_what_is_no_json_is_told(data):
    assert said_of(CompletionBody, data).startswith(("the body is empty", "the body is no JSON"))


def test_a_long_list_of_wrong_entries_has_one_mistake_per_kind_of_list():
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": [*range(10_000), None]})
    assert caught.value.error_count() < 10
