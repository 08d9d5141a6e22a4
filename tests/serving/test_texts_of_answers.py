"""Texts, offsets and bytes of answers of real tokenizers whose tokens are parts of characters."""

import asyncio
import functools
import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from relibra.serving.channel import Progress
from relibra.serving.server.bodies import ChatBody, CompletionBody
from relibra.serving.server.forked import run_forked
from relibra.serving.server.text import TextCodec

END, CALL, SPACED = 256, 257, 258


def byte_level():
    """Return the tokenizer of GPT-2's kind: a token is spelt by a character for each byte."""
    letters = [
        *range(0x800),
        *range(0x800, 0xD800, 0x400),
        *range(0xE000, 0x10000, 0x400),
        *range(0x10000, 0x110000, 0x4000),
    ]
    text = "".join(map(chr, letters))  # all bytes that texts have
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    spelt = dict(zip(text.encode(), "".join(piece for piece, _ in pieces), strict=True))
    never = [byte for byte in range(256) if byte not in spelt]
    spelt |= dict(zip(never, sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(spelt.values())), strict=True))
    vocabulary = {spelt[byte]: byte for byte in range(256)} | {"</s>": END, "<call>": CALL, "Ġab": SPACED}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    core.decoder = decoders.ByteLevel()
    return core


def byte_fallback():
    """Return the tokenizer of SentencePiece's kind: a byte is spelt by its number, and the first space is dropped."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"</s>": END, "<call>": CALL, "▁ab": SPACED}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    space = decoders.Replace("▁", " ")
    core.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return core


@functools.cache
def codec_of(kind):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=kind(), eos_token="</s>", additional_special_tokens=["<call>"], chat_template="<call><call>"
    )
    return TextCodec(tokenizer, (END,), 259)


def parts_of(codec, body, tokens, cuts, *, forked=()):
    """Return the parts of an answer that events after some of its tokens hold.

    forked   events that are written in a process of their own
    """
    [choice] = body.choices(codec, 10_000, body.prompts(codec, 10_000))
    parts, scores = [], tuple(-0.5 for _ in choice.prompt[1:])
    for place, token in enumerate(tokens):
        last = place == len(tokens) - 1
        top = ((token, -1.0), ((token + 1) % 256, -2.0))
        finish = "length" if last else None
        choice.put(
            Progress(number=0, token=token, log_prob=-1.0, top=top, finish=finish, prompt_log_probs=scores or None)
        )
        scores = ()
        if last or place in cuts:
            choice.read()
            write = functools.partial(body.part, codec, choice, not cuts)
            parts += asyncio.run(run_forked(lambda write=write: [write()])) if len(parts) in forked else [write()]
            choice.clear()
        if choice.finish:
            break
    return parts


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


WORDS = st.text(max_size=4).map(lambda text: [*text.encode()])
TOKENS = st.lists(WORDS | st.sampled_from([[CALL], [SPACED], [*"\N{GRINNING FACE}é".encode()]]), min_size=1, max_size=5)
TOKENS = TOKENS.map(lambda words: [*flat(words), 97])
CUTS = st.sets(st.integers(0, 30), min_size=1)


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
@given(
    prompt=TOKENS, tokens=TOKENS, cuts=CUTS, echo=st.booleans(), skip=st.booleans(), choose=st.none() | st.slices(12)
)
def test_offsets_of_a_stream_are_those_of_the_text(kind, prompt, tokens, cuts, echo, skip, choose):
    codec = codec_of(kind)
    body = {"prompt": prompt, "max_tokens": 99, "logprobs": 1, "echo": echo, "skip_special_tokens": skip}
    full = parts_of(codec, CompletionBody(**body), tokens, ())[0]["text"]
    if choose is not None and (stop := full[len(codec.decode(prompt, skip)) if echo else 0 :][choose]):
        body["stop"] = stop
    [whole] = parts_of(codec, CompletionBody(**body), tokens, ())
    streamed = parts_of(codec, CompletionBody(**body), tokens, cuts)
    assert "".join(part["text"] for part in streamed) == whole["text"]
    listed = whole["logprobs"]
    shown = len(listed["tokens"])
    lists = {name: flat(part["logprobs"][name] for part in streamed) for name in listed}
    assert {name: values[:shown] for name, values in lists.items()} == listed
    text, offsets = whole["text"], listed["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] <= len(text)
    if "stop" not in body:
        assert text == full
        for name, offset in zip(listed["tokens"], offsets, strict=True):
            left_out = name.startswith("token_id") or (skip and name == "<call>")
            assert left_out or text.startswith((name, name.lstrip(" ") if offset == 0 else name), offset)


@pytest.mark.parametrize("forked", [{0}, {1}, {0, 1}])
def test_offsets_of_an_event_written_in_a_fork_are_the_same(forked):
    codec = codec_of(byte_level)
    body = CompletionBody(prompt=[*b"ab", CALL, *b"cd"], max_tokens=9, logprobs=1, echo=True, stream=True)
    expected = parts_of(codec, body, [*b"efgh"], {0, 1})
    assert flat(part["logprobs"]["text_offset"] for part in expected) == [0, 1, 2, 2, 3, 4, 5, 6, 7]
    assert parts_of(codec, body, [*b"efgh"], {0, 1}, forked=forked) == expected


class ChatEndingWithText(ChatBody):
    """A chat whose prompt ends with text: some tokenizers drop the first space of all."""

    def prompts(self, *_):
        return [[97, CALL]]


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
@given(tokens=TOKENS, cuts=CUTS, skip=st.booleans())
def test_bytes_of_a_chat_are_those_of_its_text(kind, tokens, cuts, skip):
    codec = codec_of(kind)
    message = {"role": "user", "content": "x"}
    body = ChatEndingWithText(messages=[message], logprobs=True, top_logprobs=2, skip_special_tokens=skip)
    [whole] = parts_of(codec, body, tokens, ())
    streamed = parts_of(codec, body, tokens, cuts)
    content = flat(part["logprobs"]["content"] for part in streamed)
    assert content == whole["logprobs"]["content"]
    text = whole["message"]["content"]
    assert "".join(part["delta"]["content"] for part in streamed) == text
    assert bytes(flat(one["bytes"] or [] for one in content)) == text.encode()
    for one, token in zip(content, tokens, strict=True):
        assert one["top_logprobs"][0] == {"token": one["token"], "bytes": one["bytes"], "logprob": -1.0}
        if token < 256:
            assert one["bytes"] == [token]
        elif token == CALL:
            assert one["bytes"] == (None if skip else [*b"<call>"])


def test_names_of_tokens_are_their_numbers_where_asked_for():
    codec, asked = codec_of(byte_level), {"return_tokens_as_token_ids": True}
    completion = CompletionBody(prompt=[97], max_tokens=9, logprobs=0, echo=True, **asked)
    listed = parts_of(codec, completion, [98, CALL], ())[0]["logprobs"]
    assert listed["tokens"] == ["token_id:97", "token_id:98", f"token_id:{CALL}"]
    assert [one and next(iter(one)) for one in listed["top_logprobs"]] == [None, *listed["tokens"][1:]]
    chat = ChatEndingWithText(messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2, **asked)
    first, second = parts_of(codec, chat, [98, CALL], ())[0]["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == ("token_id:98", [98])
    assert [one["token"] for one in second["top_logprobs"]] == [f"token_id:{CALL}", f"token_id:{(CALL + 1) % 256}"]


def test_a_token_of_the_vocabulary_only_adds_nothing():
    codec = codec_of(byte_level)
    assert codec.token(300).data == b""
    assert TextCodec(None, (), 300).token(3).data is None
