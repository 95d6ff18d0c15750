"""YAML is read with the place of every value, and every malformed text ends in one clear error."""

import pytest

from evenload.dialects.yaml_source import parse_yaml, read_yaml, steps
from evenload.errors import EvenloadError

TEXT = r"""# settings
parallel_config:   # degrees
  pipeline_stage: 4
  offset: [1, 0,
      -1]
  'feed_forward\.mul': on
shared: &shared {a: 1, b: 2}
own:
  <<: *shared
  b: 3
  again: *shared
"""


def test_values_are_plain_and_merges_are_followed():
    source = parse_yaml(TEXT)
    assert source.data == {
        "parallel_config": {"pipeline_stage": 4, "offset": [1, 0, -1], r"feed_forward\.mul": True},
        "shared": {"a": 1, "b": 2},
        "own": {"a": 1, "b": 3, "again": {"a": 1, "b": 2}},
    }


@pytest.mark.parametrize(
    ("path", "key", "where"),
    [
        ((), False, "s.yaml:2:1"),
        (("parallel_config",), True, "s.yaml:2:1"),
        (("parallel_config", "pipeline_stage"), False, "s.yaml:3:19"),
        (("parallel_config", "offset", 2), False, "s.yaml:5:7"),
        (("parallel_config", r"feed_forward\.mul"), True, "s.yaml:6:3"),
        (("own", "a"), False, "s.yaml:7:21"),
        (("own", "b"), False, "s.yaml:10:6"),
        (("parallel_config", "offset", 9), False, "s.yaml:4:11"),
        (("parallel_config", "missing"), True, "s.yaml:2:1"),
    ],
)
def test_every_path_has_a_place(path, key, where):
    assert parse_yaml(TEXT, name="s.yaml").where(*path, key=key) == where


def test_paths_of_inner_rooms_are_understood():
    assert steps("$.a.b[1][0]") == ("a", "b", 1, 0)
    assert steps(r"$.select['feed_forward\.mul'][2]") == ("select", r"feed_forward\.mul", 2)
    assert steps("$") == ()
    assert parse_yaml(TEXT, name="s").where_of("$.parallel_config.offset[1]") == "s:4:15"


def test_words_and_numbers_are_resolved_as_mindformers_does():
    text = "a: yes\nb: Off\nc: 'on'\nd: y\ne: 010\nf: 0x1F\ng: 1_000\nh: 1:30\ni: .inf\nj: ~\nk:\nl: 2001-01-01\nn: -5"
    assert parse_yaml(text).data == {
        "a": True,
        "b": False,
        "c": "on",
        "d": "y",
        "e": 8,
        "f": 31,
        "g": 1000,
        "h": 90,
        "i": float("inf"),
        "j": None,
        "k": None,
        "l": "2001-01-01",
        "n": -5,
    }


@pytest.mark.parametrize(
    ("text", "fact", "where"),
    [
        ("# only a comment\n", "only comments", "f"),
        ("a: b: c", "mapping values are not allowed", "f:1:5"),
        ("a: [1, 2", "expected ',' or ']'", "f:1:9"),
        ("a:\n\tb: 1", "cannot start any token", "f:2:1"),
        ("a: [20, 0]e", "not valid YAML", "f:1:11"),
        ("a: 1\n---\nb: 2", "another document", "f:2:1"),
        ("ok: 1\na: \x07", "a control character", "f:2:4"),
        ("[1, 2]", "the top level is a list", "f:1:1"),
        ("word", "the top level is a single value", "f:1:1"),
        ("a: *nobody", "undefined alias 'nobody'", "f:1:4"),
        ("a: &x [*x]", "contains itself", "f:1:4"),
        ('a: "feed\\.mul"', "unknown escape character", "f:1:10"),
        ("a: 1\nb:\n  c: 1\n  c: 2", "the key 'c' is given twice, first on line 3", "f:4:3"),
        ("? [1]\n: 2", "a key must be a plain word", "f:1:3"),
        ("a: !mine 1", "the tag '!mine' is not understood", "f:1:4"),
        ("a: " + "9" * 5000, "is not a number that can be read", "f:1:4"),
        ("<<: 3", "merges mappings only", "f:1:5"),
        ("{" * 5000, "nested too deeply", "f"),
        ("- " * 5000, "nested too deeply", "f"),
    ],
)
def test_malformed_text_is_one_error_with_a_place(text, fact, where):
    with pytest.raises(EvenloadError) as caught:
        parse_yaml(text, name="f")
    assert fact in caught.value.fact
    assert caught.value.where == where


def test_aliases_that_multiply_cost_nothing():
    bomb = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n"
    bomb += "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    source = parse_yaml(bomb)  # expanded, it would not fit into any memory
    assert len(source.data["a29"]) == 9


def test_files_are_read_and_named(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"a: 1\r\nb:\r\n  - x\r\n")
    source = read_yaml(file)
    assert source.data == {"a": 1, "b": ["x"]}
    assert source.where("b", 0) == f"{file}:3:5"
