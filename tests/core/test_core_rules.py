"""Rules: patterns to roles, read from TOML or a mapping; what matches nothing, or twice, is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lindos.core.errors import RulesError
from lindos.core.rules import ROLES, Rule, Rules

NAMES = ["wte", "h.0.attn.c_attn", "h.0.mlp.c_proj", "h.1.attn.c_attn", "h.1.mlp.c_proj", "h.10.mlp.c_proj", "ln_f"]
TEXT = """
[tensor]
"wte" = "vocabulary_embedding"
"h.*.attn.c_attn" = { role = "column", blocks = [8, 4, 4], heads = "query" }
"h.*.mlp.c_proj" = "row"
"""


def test_read_and_resolve(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(TEXT)
    rules = Rules.read(path)
    assert Rules.read(str(path)) == rules
    assert Rules.read(rules) is rules
    attention = Rule("h.*.attn.c_attn", "column", (8, 4, 4), "query")
    assert rules.rules == (Rule("wte", "vocabulary_embedding"), attention, Rule("h.*.mlp.c_proj", "row"))
    found = rules.resolve(NAMES)
    assert set(found) == set(NAMES) - {"ln_f"}
    assert found["h.1.attn.c_attn"] is rules.rules[1]
    assert found["h.10.mlp.c_proj"].role == "row"
    assert rules.resolve(iter(NAMES)) == found


def test_read_a_mapping():
    table = {"tensor": {"a": "row", "b.*": {"role": "column", "blocks": 3}}}
    assert Rules.read(table).rules == (Rule("a", "row"), Rule("b.*", "column", 3))
    assert Rules.read({"tensor": {}}).resolve(NAMES) == {}


PARTS = st.lists(st.sampled_from(["a", "b", "a+b", "w", "0", "17", "(x"]), min_size=1, max_size=4)


@given(PARTS, PARTS)
def test_star_is_one_part(pattern_parts, name_parts):
    """Against a match part by part."""
    pattern_parts = ["*" if part == "w" else part for part in pattern_parts]
    expected = len(pattern_parts) == len(name_parts) and all(
        p in ("*", n) for p, n in zip(pattern_parts, name_parts, strict=True)
    )
    assert Rule(".".join(pattern_parts), "row").matches(".".join(name_parts)) is expected


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("h.*", "h.3", True),
        ("h.*", "h.3.mlp", False),
        ("h.*", "h.", False),
        ("h.*.mlp", "h.3xmlp", False),
        ("*.proj_*", "a.proj_q", True),
        ("h.3", "xh.3", False),
        ("a.b", "axb", False),
    ],
)
def test_pattern(pattern, name, matches):
    assert Rule(pattern, "row").matches(name) is matches


@pytest.mark.parametrize("role", ROLES)
def test_every_role_can_be_written(role):
    assert Rules.read({"tensor": {"a": role}}).resolve(["a"])["a"].role == role


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"h.*.attn.c_atn": "row"},
            "'h.*.attn.c_atn' matches no module or parameter: did you mean 'h.[01].attn.c_attn'",
        ),
        ({"h.*": "row"}, "matches no module"),
        ({"wte": "row", "wt*": "column"}, "'wte' is matched twice, by 'wte' and 'wt[*]'"),
        ({"wte": "colum"}, "'wte' names no known role 'colum': did you mean 'column'"),
        ({"wte": {"role": ["row"]}}, r"no known role \['row'\]"),
        ({"wte": {"role": 3}}, "no known role 3"),
        ({"wte": {"blocks": 3}}, "is a role or a table of role, blocks, heads, home, dim"),
        ({"wte": {"role": "row", "block": 3}}, "is a role or a table of role, blocks, heads, home, dim"),
        ({"wte": 3}, "is a role or a table"),
        ({"wte": {"role": "column", "heads": "keys"}}, "heads is 'query' or 'key_value'; got 'keys'"),
        ({"wte": {"role": "column", "blocks": 0}}, "blocks is a number .* got 0"),
        ({"wte": {"role": "column", "blocks": "3"}}, "got '3'"),
        ({"wte": {"role": "column", "blocks": [4, 0]}}, r"got \(4, 0\)"),
        ({"wte": {"role": "column", "blocks": []}}, r"got \(\)"),
        ({"wte": {"role": "whole", "blocks": 7}}, "the role whole takes nothing else; got blocks too"),
        ({"wte": {"role": "column", "dim": 1}}, "the role column takes blocks, heads, home; got dim too"),
        ({"wte": {"role": "head_parameter", "dim": True}}, "dim a number; got '' and True"),
    ],
)
def test_errors(table, message):
    with pytest.raises(RulesError, match=message):
        Rules.read({"tensor": table}).resolve(NAMES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[tensor", "is no TOML"),
        (b"[tensor]\n'a' = 'row'\n'a' = 'row'\n", "is no TOML"),
        (b"\xff\xfe", "is no TOML"),
        (b"", r"one table, \[tensor\]; got \[\]"),
        (b"[tensors]\n'a' = 'row'\n", r"got \['tensors'\]"),
        (b"[tensor]\n[pipeline]\n", r"got \['pipeline', 'tensor'\]"),
        (b"tensor = 3\n", r"one table, \[tensor\]"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "rules.toml"
    path.write_bytes(content)
    with pytest.raises(RulesError, match=message):
        Rules.read(path)


def test_no_file(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(RulesError, match="there is none at"):
            Rules.read(path)
