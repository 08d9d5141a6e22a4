"""The official client of OpenAI against `relibra serve`."""

import concurrent.futures
import time

import httpx
import openai
import pytest
import torch

from tests.serving.models import greedy_answer
from tests.serving.server_process import LETTERS, relibra_serve, write_text_model

KEY = "sk-of-a-test"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = write_text_model(folder)
    keys = folder / "keys"
    keys.write_text(f"{KEY}\nsk-of-another\n")
    options = ("--api-key-from", f"file:{keys}", "--name", "tiny", "--max-batch", "4", "--max-waiting", "24")
    options += ("--max-length", "700")
    with relibra_serve(folder, *options) as (url, _):
        yield model, openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0), url


def text_of(model, prompt, limit):
    """Return the greedy answer of the whole model, as text, without what ends it."""
    tokens = greedy_answer(model, tuple(LETTERS.index(one) + 1 for one in prompt), limit).tokens
    return "".join(LETTERS[token - 1] if 0 < token <= len(LETTERS) else "" for token in tokens)


def test_a_chat_is_answered_in_the_template_of_the_model(served):
    model, client, _ = served
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


def test_a_streamed_chat_has_the_text_of_the_whole_one(served):
    _, client, _ = served
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


def test_completions_echo_and_score_their_prompt(served):
    model, client, _ = served
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


def test_stop_texts_end_an_answer_and_are_no_part_of_it(served):
    _, client, _ = served
    asked = {"model": "tiny", "prompt": "stop", "seed": 3, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**asked).choices[0].text
    stop = text[6:9]
    [choice] = client.completions.create(**asked, stop=[stop, "never there"]).choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    streamed = "".join(part.choices[0].text for part in client.completions.create(**asked, stop=stop, stream=True))
    assert streamed == choice.text


def test_special_tokens_are_stop_texts_too(served):
    _, client, _ = served
    asked = {"model": "tiny", "prompt": "stop", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    for seed in range(8):  # the last of the letters is the end token, which answers hold, and texts leave out
        [choice] = client.completions.create(**asked, seed=seed, stop="\n").choices
        [whole] = client.completions.create(**asked, seed=seed, logprobs=0).choices
        names = whole.logprobs.tokens
        assert choice.finish_reason == ("stop" if "\n" in names else "length")
        if "\n" in names:
            assert choice.text == "".join(name for name in names[: names.index("\n")] if len(name) == 1)
            assert choice.stop_reason == "\n"


def test_what_ends_a_text_is_shown_where_it_is_asked_for(served):
    _, client, _ = served
    asked = {"model": "tiny", "prompt": "stop", "seed": 3, "max_tokens": 24}
    text = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    fields = {"ignore_eos": True, "include_stop_str_in_output": True}
    [choice] = client.completions.create(**asked, stop=text[6:9], extra_body=fields).choices
    assert choice.text == text[: text.index(text[6:9]) + 3]
    messages = [{"role": "user", "content": "x"}]
    for wrong in ({"chat_template": "{{ 1 }}"}, {"tokenize": False}, {"max_length": 1}):
        with pytest.raises(openai.BadRequestError, match="no variable of the template"):
            client.chat.completions.create(model="tiny", messages=messages, extra_body={"chat_template_kwargs": wrong})


def test_special_tokens_are_shown_where_they_are_asked_for(served):
    _, client, _ = served
    asked = {"model": "tiny", "prompt": "stop", "max_tokens": 100, "logprobs": 0, "seed": 1}
    fields = {"ignore_eos": True, "skip_special_tokens": False}
    [choice] = client.completions.create(**asked, extra_body=fields).choices
    assert "\n" in choice.text, "the end token"
    assert choice.text == "".join(name for name in choice.logprobs.tokens if not name.startswith("token_id"))


def test_top_k_of_one_is_greedy(served):
    _, client, _ = served
    asked = {"model": "tiny", "prompt": "top", "max_tokens": 6}
    greedy = client.completions.create(**asked, temperature=0).choices[0].text
    assert client.completions.create(**asked, extra_body={"top_k": 1}).choices[0].text == greedy
    assert client.completions.create(**asked, top_p=1e-9).choices[0].text == greedy


def test_errors_are_those_of_the_client(served):
    _, client, url = served
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="a", max_tokens=701)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    assert [one.id for one in client.models.list()] == ["tiny"]


def test_a_full_queue_is_refused_and_says_when_to_come_back(served):
    _, client, url = served
    asked = {"model": "tiny", "prompt": "a", "extra_body": {"ignore_eos": True}}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = []
        # The first answers are long, so that they run as long as this looks, on a busy machine too.
        for number, limit, line in ((5, 600, b"relibra_running 5.0"), (24, 8, b"relibra_waiting 24.0")):
            running.append(pool.submit(client.completions.create, **asked, n=number, max_tokens=limit))
            while line not in httpx.get(f"{url}/metrics").content:
                assert not any(one.done() for one in running)
        with pytest.raises(openai.RateLimitError, match="24 of 24") as refused:
            client.completions.create(**asked)
        assert {len(one.result().choices) for one in running} == {5, 24}
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert b"relibra_waiting 0.0" in httpx.get(f"{url}/metrics").content


def test_a_client_that_leaves_frees_its_place(served):
    _, client, url = served
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
