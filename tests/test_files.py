import tomllib

from hypothesis import given
from hypothesis import strategies as st

from relibra.files import let_all_read, toml_value

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(TEXTS, parts, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_toml_reads_back_as_the_same_value(value):
    assert tomllib.loads(f"it = {toml_value(value)}")["it"] == value


def test_rare_characters_of_keys_and_values_are_valid_toml():
    rare = {"\U0001f600": '\x7f\x00\t\r\n"\\', "\x7f": "\U0001f600"}
    assert tomllib.loads(f"it = {toml_value(rare)}")["it"] == rare
    lone = {"\udc80": "caf\udce9"}
    assert tomllib.loads(f"it = {toml_value(lone)}")["it"] == {r"\udc80": r"caf\udce9"}


def test_all_may_read_a_folder_of_folders(tmp_path):
    (tmp_path / "templates").mkdir(mode=0o700)
    (tmp_path / "templates" / "tools.jinja").touch(mode=0o600)
    let_all_read(tmp_path)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path, *sorted(tmp_path.rglob("*")))]
    assert modes == [0o755, 0o755, 0o644]
