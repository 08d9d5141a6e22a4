"""Tokenizers: characters, models, and a built-in policy's own saved beside its weights."""

import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    GenerationConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from relibra.errors import ConfigError
from relibra.rl.config.settings import TaskSettings
from relibra.rl.model.tokenizer import ModelTokenizer
from relibra.rl.toy.character_tokenizer import PADDING, CharacterTokenizer
from relibra.rl.toy.tasks import STOP, Arithmetic, Strings
from relibra.serving.server.text import load_codec

CHARACTERS = Arithmetic.characters
TOKENIZER = CharacterTokenizer(CHARACTERS)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{{ m.content }}={% endfor %}{% if add_generation_prompt %}0{% endif %}"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a character tokenizer as a model's."""
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(folder)
    return folder


def test_every_character_has_an_id_of_its_own_and_back():
    ids = TOKENIZER.encode(CHARACTERS)
    assert sorted(ids) == list(range(1, TOKENIZER.vocab_size))
    assert TOKENIZER.decode(ids[:-1]) == CHARACTERS.removesuffix(STOP)
    assert TOKENIZER.encode(STOP) == list(TOKENIZER.stop_ids)
    assert TOKENIZER.pad_id not in ids


def test_decoding_leaves_out_the_stop_at_the_end_only():
    assert TOKENIZER.decode(TOKENIZER.encode("1.2.")) == "1.2"
    assert TOKENIZER.decode(TOKENIZER.encode("1..")) == "1."
    assert TOKENIZER.decode([]) == ""
    assert TOKENIZER.decode([*TOKENIZER.encode("1."), TOKENIZER.pad_id]) == f"1.{PADDING}"
    assert TOKENIZER.decode(TOKENIZER.encode_response("1+1")) == "1+1"


def test_character_without_id_is_named_and_messages_are_refused():
    with pytest.raises(ConfigError, match=r"no token for \['x'\] in '1x2': known characters are "):
        TOKENIZER.encode("1x2")
    with pytest.raises(ConfigError, match=r"no chat template for messages: set model\.path"):
        TOKENIZER.encode([{"role": "user", "content": "1"}])


@pytest.mark.parametrize("characters", [CHARACTERS, Strings.characters, "aA b\n\t'é中\N{GRINNING FACE}."])
def test_saved_character_tokenizer_has_same_ids_in_transformers(tmp_path, characters):
    own = CharacterTokenizer(characters)
    own.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    loaded = ModelTokenizer.load(str(tmp_path))
    assert (len(theirs), theirs.pad_token_id, theirs.eos_token_id) == (own.vocab_size, own.pad_id, own.stop_ids[0])
    assert (loaded.vocab_size, loaded.pad_id, loaded.stop_ids) == (own.vocab_size, own.pad_id, own.stop_ids)

    @given(st.text(alphabet=characters), st.lists(st.integers(0, len(characters))))
    def same(text, ids):
        assert theirs.encode(text) == loaded.encode(text) == own.encode(text)
        assert loaded.encode_response(text) == own.encode_response(text)
        assert loaded.decode(ids) == own.decode(ids)

    same()


def test_messages_go_through_the_chat_template(saved, tmp_path):
    messages = [{"role": "user", "content": "1+2"}]
    with pytest.raises(ConfigError, match="no chat template"):
        ModelTokenizer.load(str(saved)).encode(messages)
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = ModelTokenizer.load(str(tmp_path))
    assert tokenizer.encode(messages) == TOKENIZER.encode("1+2=0")
    with pytest.raises(ConfigError, match=r"messages .*\(TemplateError: no system message\)"):
        tokenizer.encode([{"role": "system", "content": "1"}])


@pytest.fixture
def chat(saved, tmp_path):
    """Return a function that loads a tokenizer with a chat template, and settings of the task."""

    def load(template, **settings):
        shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
        (tmp_path / "chat_template.jinja").write_text(template)
        return ModelTokenizer.load(str(tmp_path), TaskSettings(**settings))

    return load


def test_a_text_is_a_user_message_where_there_is_a_template(chat, saved):
    assert chat(TEMPLATE).encode("1+2") == TOKENIZER.encode("1+2=0")
    assert chat(TEMPLATE, prompt_format="text").encode("1+2") == TOKENIZER.encode("1+2")
    assert ModelTokenizer.load(str(saved)).encode("1+2") == TOKENIZER.encode("1+2")


def test_a_last_message_of_the_assistant_is_continued(chat):
    tokenizer = chat("{% for m in messages %}{{ m.content }}={% endfor %}{% if add_generation_prompt %}0{% endif %}")
    begun = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3,4"}]
    assert tokenizer.encode(begun) == TOKENIZER.encode("1+2=3,4")
    assert tokenizer.encode(begun[:1]) == TOKENIZER.encode("1+2=0")
    with pytest.raises(ConfigError, match="rejects the messages"):  # the template leaves out what is to be continued
        chat("{{ messages[0].content }}").encode(begun)


def test_variables_reach_the_template_those_of_the_row_last(chat):
    template = (
        "{{ messages[0].content }}{{ short if short is defined }}{% for t in tools or [] %}{{ t.n }}{% endfor %}="
    )
    tokenizer = chat(template, template_variables={"short": 1})
    assert tokenizer.encode("2+") == TOKENIZER.encode("2+1=")
    assert tokenizer.encode("2+", short=3, tools=[{"n": "7"}]) == TOKENIZER.encode("2+37=")
    for name in ("shot", "messages", "tokenize", "chat_template", "add_generation_prompt", "self", "prompt"):
        with pytest.raises(ConfigError, match=f"has no variable '{name}'"):
            tokenizer.encode("2+", **{name: 1})


def test_variables_without_a_template_are_refused(chat, saved):
    for tokenizer in (ModelTokenizer.load(str(saved)), chat(TEMPLATE, prompt_format="text"), TOKENIZER):
        with pytest.raises(ConfigError, match="chat template"):
            tokenizer.encode("1+2", tools=[{}])


def test_a_text_in_the_template_already_is_fed_only_on_request(chat):
    assert chat(TEMPLATE).encode("1.+2") == TOKENIZER.encode("1.+2=0")  # a special token elsewhere is content
    for text in (f"{STOP}1+2=0", f"\n {STOP}1"):
        with pytest.raises(ConfigError, match=r"begins with a special token .* set task\.prompt_format=text"):
            chat(TEMPLATE).encode(text)
    assert chat(TEMPLATE, prompt_format="text").encode(f"{STOP}1") == TOKENIZER.encode(f"{STOP}1")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "does not end within 0.2 s"),
        ("{% for a in range(10**9) %}x{% endfor %}", "OverflowError"),
        ("{{ messages[3].x.y }}", "rejects the messages"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "rejects the messages"),
    ],
)
def test_a_template_that_fails_or_never_ends_is_told(saved, tmp_path, monkeypatch, template, said):
    monkeypatch.setattr("relibra.rl.model.tokenizer.TEMPLATE_SECONDS", 0.2)
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=said):
        ModelTokenizer.load(str(tmp_path)).encode([{"role": "user", "content": "1"}])


def test_damaged_tokenizers_are_told(saved, tmp_path):
    for name, text in (("tokenizer.json", "[" * 100_000), ("tokenizer.json", "{}"), ("tokenizer_config.json", "3")):
        folder = tmp_path / f"{name}{len(text)}"
        shutil.copytree(saved, folder)
        (folder / name).write_text(text)
        with pytest.raises(ConfigError, match=r"the tokenizer of model\.path .* cannot be loaded"):
            ModelTokenizer.load(str(folder))


def test_responses_end_as_tokenizer_or_generation_settings_say(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    stop, comma = TOKENIZER.stop_ids[0], TOKENIZER.encode(",")[0]
    GenerationConfig(eos_token_id=[comma, stop]).save_pretrained(tmp_path)
    tokenizer = ModelTokenizer.load(str(tmp_path))
    assert tokenizer.stop_ids == (stop, comma)
    assert tokenizer.decode(TOKENIZER.encode("1,2,")) == "1,2"
    assert tokenizer.encode_response("1")[-1] == stop


def byte_level(around: str, folder):
    """Save byte-level tokens, with special ones around a text, as most real models have them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({token: i for i, token in enumerate([*alphabet, "ab", "<s>", "</s>", "<think>"])}, [("a", "b")])
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(around, special_tokens=[("<s>", 257), ("</s>", 258)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<think>"]
    )
    fast.save_pretrained(folder)
    return str(folder)


def test_prompt_has_the_start_token_and_response_continues_it(tmp_path):
    tokenizer = ModelTokenizer.load(byte_level("<s> $A", tmp_path))
    prompt, response = tokenizer.encode("ab"), tokenizer.encode_response("ab  é ,.")
    assert prompt == [257, 256]
    assert (response[0], response[-1]) == (256, 258)
    assert tokenizer.decode(response) == "ab  é ,."
    assert tokenizer.decode([259, *response]) == "<think>ab  é ,."
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.stop_ids) == (260, 258, (258,))


@pytest.mark.parametrize("around", ["$A", "<s> $A", "$A </s>", "<s> $A </s>", "</s> <s> $A </s>", "</s> $A </s>"])
def test_a_text_gets_start_tokens_once_and_no_end_token(around, tmp_path):
    """Start and end may be the same token: where the tokenizer puts it decides."""
    folder = byte_level(around, tmp_path)
    start = [{"<s>": 257, "</s>": 258}[token] for token in around.partition("$A")[0].split()]
    tokenizer = ModelTokenizer.load(folder)
    bare = ModelTokenizer.load(folder, TaskSettings(add_special_tokens=False))
    for text, ids in (("ab", [256]), ("<think>ab", [259, 256]), ("ab</s>ab", [256, 258, 256])):
        assert tokenizer.encode(text) == [*start, *ids]
        assert bare.encode(text) == ids
    begun = "".join({257: "<s>", 258: "</s>"}[one] for one in start) + "ab"
    assert tokenizer.encode(begun) == [*start, 256]
    assert tokenizer.encode_response("ab") == [256, 258]


def test_a_template_that_writes_the_start_token_gives_one(tmp_path):
    folder = byte_level("<s> $A </s>", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = ModelTokenizer.load(folder)
    assert tokenizer.encode("ab") == [257, 256]
    assert tokenizer.encode([{"role": "user", "content": "ab"}]) == [257, 256]


def test_without_a_padding_token_the_end_of_sequence_pads(saved, tmp_path):
    theirs = AutoTokenizer.from_pretrained(saved)
    theirs.pad_token = None
    theirs.save_pretrained(tmp_path)
    assert ModelTokenizer.load(str(tmp_path)).pad_id == TOKENIZER.stop_ids[0]


@pytest.fixture
def endless(saved, tmp_path):
    """Return the folder of a model whose tokenizer has no eos_token."""
    folder = tmp_path / "endless"
    theirs = AutoTokenizer.from_pretrained(saved)
    theirs.eos_token = None
    theirs.save_pretrained(folder)
    return folder


def test_a_model_whose_responses_never_end_is_refused(endless):
    with pytest.raises(ConfigError, match=r"eos_token of the tokenizer or eos_token_id in generation_config\.json"):
        ModelTokenizer.load(str(endless))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (Qwen3MoeConfig(eos_token_id=3), None, (3,)),
        (Qwen3MoeConfig(eos_token_id=[4, 3]), GenerationConfig(do_sample=True), (4, 3)),
        (Qwen3MoeConfig(eos_token_id=3), GenerationConfig(eos_token_id=[5, 6]), (5, 6)),
        (Gemma3Config(text_config={"eos_token_id": 7}), None, (7,)),
        (Qwen3MoeConfig(eos_token_id=-1), None, ()),
        (Qwen3MoeConfig(vocab_size=64, eos_token_id=[3, 64]), None, (3, 64)),
    ],
    ids=["configuration", "generation without", "generation first", "nested", "none", "beyond the vocabulary"],
)
@pytest.mark.parametrize("own", [True, False])
def test_trainer_and_server_stop_at_the_same_tokens(saved, endless, config, generation, expected, own):
    if own:
        shutil.copytree(saved, endless, dirs_exist_ok=True)
        expected = (TOKENIZER.stop_ids[0], *expected)
    for one in filter(None, (config, generation)):
        one.save_pretrained(endless)
    codec = load_codec(endless)
    assert codec.encode("1+2") == TOKENIZER.encode("1+2")
    assert codec.stop_ids == tuple(stop for stop in expected if stop < config.get_text_config().vocab_size)
    if expected:
        assert ModelTokenizer.load(str(endless)).stop_ids == expected


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("generation_config.json", "{"),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": "</s>"}'),
        ("generation_config.json", '{"eos_token_id": [2, true]}'),
        ("config.json", '{"model_type": "qwen3_moe", "eos_token_id": "</s>"}'),
        ("tokenizer.json", "{}"),
    ],
)
def test_a_damaged_file_is_an_error_for_trainer_and_server(endless, file, text):
    Qwen3MoeConfig(eos_token_id=3).save_pretrained(endless)
    (endless / file).write_text(text)
    for load in (ModelTokenizer.load, lambda folder: load_codec(Path(folder))):
        with pytest.raises(ConfigError, match=f"model.path '{endless}' cannot be loaded"):
            load(str(endless))


def test_defaults_of_a_class_of_configurations_stop_nothing(endless):
    (endless / "config.json").write_text('{"model_type": "mixtral", "vocab_size": 64}')
    assert MixtralConfig().eos_token_id == 2
    assert load_codec(endless).stop_ids == ()


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    (tmp_path / "moe").mkdir()
    Qwen3MoeConfig(eos_token_id=3).save_pretrained(tmp_path / "moe")
    assert load_codec(tmp_path / "moe").tokenizer is None
    assert load_codec(tmp_path / "moe").stop_ids == (3,)
    for folder in (tmp_path, tmp_path / "moe", tmp_path / "absent"):
        with pytest.raises(ConfigError, match=f"the tokenizer of model.path '{folder}' cannot be loaded"):
            ModelTokenizer.load(str(folder))
