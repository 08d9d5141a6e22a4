"""The official client of OpenAI against `relibra serve`."""

import time

import httpx
import openai
import pytest
import torch

from tests.serving.models import greedy_answer
from tests.serving.server_process import LETTERS


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0)


def text_of(model, prompt, limit):
    """Return the greedy answer of the whole model, as text, without what ends it."""
    tokens = greedy_answer(model, tuple(LETTERS.index(one) + 1 for one in prompt), limit).tokens
    return "".join(LETTERS[token - 1] if 0 < token <= len(LETTERS) else "" for token in tokens)


def test_a_chat_is_answered_in_the_template_of_the_model(served, client):
    model = served[0]
    messages = [{"role": "system", "content": "abc"}, {"role": "user", "content": [{"type": "text", "text": "de"}]}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.usage.prompt_tokens == len("abc;de")
    [choice] = answer.choices
    expected = text_of(model, "abc;de", 8)
    assert choice.message.content == expected.partition("\n")[0]
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    for one in choice.logprobs.content:
        assert one.top_logprobs[0].token == one.token
        assert len(one.top_logprobs) == 3


def test_a_streamed_chat_has_the_text_of_the_whole_one(client):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "seed": 7, "n": 3, "max_tokens": 12}
    whole = client.chat.completions.create(**asked)
    texts, reasons, usage = ["", "", ""], [None] * 3, None
    for part in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert len(set(texts)) == 3, "samples of a prompt differ"


def test_completions_echo_and_score_their_prompt(served, client):
    model = served[0]
    answer = client.completions.create(
        model="tiny", prompt=["abc", "de"], max_tokens=4, temperature=0, echo=True, logprobs=1
    )
    for choice, prompt in zip(answer.choices, ("abc", "de"), strict=True):
        assert choice.text.startswith(prompt)
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.tokens[: len(prompt)] == list(prompt)
    tokens = [LETTERS.index(one) + 1 for one in "abc"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [float(logits[n, tokens[n + 1]]) for n in range(2)]
    assert answer.choices[0].logprobs.token_logprobs[1:3] == pytest.approx(expected, abs=1e-5)


def test_stop_texts_end_an_answer_and_are_no_part_of_it(client):
    asked = {"model": "tiny", "prompt": "stop", "seed": 3, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**asked).choices[0].text
    stop = text[6:9]
    [choice] = client.completions.create(**asked, stop=[stop, "never there"]).choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    streamed = "".join(part.choices[0].text for part in client.completions.create(**asked, stop=stop, stream=True))
    assert streamed == choice.text


def test_what_ends_a_text_is_shown_where_it_is_asked_for(client):
    asked = {"model": "tiny", "prompt": "stop", "seed": 3, "max_tokens": 24}
    text = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    fields = {"ignore_eos": True, "include_stop_str_in_output": True}
    [choice] = client.completions.create(**asked, stop=text[6:9], extra_body=fields).choices
    assert choice.text == text[: text.index(text[6:9]) + 3]
    messages = [{"role": "user", "content": "x"}]
    for wrong in ({"chat_template": "{{ 1 }}"}, {"tokenize": False}, {"max_length": 1}):
        with pytest.raises(openai.BadRequestError, match="no variable of the template"):
            client.chat.completions.create(model="tiny", messages=messages, extra_body={"chat_template_kwargs": wrong})


def test_top_k_of_one_is_greedy(client):
    asked = {"model": "tiny", "prompt": "top", "max_tokens": 6}
    greedy = client.completions.create(**asked, temperature=0).choices[0].text
    assert client.completions.create(**asked, extra_body={"top_k": 1}).choices[0].text == greedy
    assert client.completions.create(**asked, top_p=1e-9).choices[0].text == greedy


def test_errors_are_those_of_the_client(client):
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="a", max_tokens=96)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="a")
    assert [one.id for one in client.models.list()] == ["tiny"]


def test_a_client_that_leaves_frees_its_place(served, client):
    url = served[1]
    for _ in range(6):
        stream = client.completions.create(
            model="tiny", prompt="abc", max_tokens=90, n=4, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    end = time.monotonic() + 5.0
    while time.monotonic() < end and b"relibra_running 0.0" not in httpx.get(f"{url}/metrics").content:
        time.sleep(0.02)
    assert b"relibra_running 0.0" in httpx.get(f"{url}/metrics").content
