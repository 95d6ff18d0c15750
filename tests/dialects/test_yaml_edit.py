"""Editing changes the values that are named and no other byte."""

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.dialects.yaml_edit import block, edit
from evenload.dialects.yaml_source import parse_yaml
from evenload.errors import EvenloadError

TEXT = r"""# MindFormers settings
parallel_config: &degrees   # degrees
  pipeline_stage: 4 # four
recompute_config:
  # why these
  recompute: [6, 3,   # rows
     2, 3]   # counts
  select_recompute: # patterns
    'feed_forward\.mul': True   # cheap
    # more may follow
    'b': [1, 2]

  # about communication
  mp_comm_recompute:
  note: "x"  # quoted
  more: |
    text
    more text

model:
  model_config: {type: LlamaConfig, offset: 0}
other: *degrees
empty:
"""


def changed(changes, text=TEXT):
    """(lines that went, lines that came)."""
    after = edit(parse_yaml(text, name="s.yaml"), changes)
    lines = list(difflib.ndiff(text.splitlines(), after.splitlines()))
    return [line[2:] for line in lines if line[0] == "-"], [line[2:] for line in lines if line[0] == "+"]


@pytest.mark.parametrize(
    ("path", "value", "gone", "come"),
    [
        (("model", "model_config", "offset"), [0, 1, 1, 0],
         ["  model_config: {type: LlamaConfig, offset: 0}"],
         ["  model_config: {type: LlamaConfig, offset: [0, 1, 1, 0]}"]),
        (("model", "model_config", "pp_interleave_num"), 2,
         ["  model_config: {type: LlamaConfig, offset: 0}"],
         ["  model_config: {type: LlamaConfig, offset: 0, pp_interleave_num: 2}"]),
        (("recompute_config", "recompute"), True,
         ["  recompute: [6, 3,   # rows", "     2, 3]   # counts"], ["  recompute: True   # counts"]),
        (("recompute_config", "select_recompute"), False,
         ["  select_recompute: # patterns", r"    'feed_forward\.mul': True   # cheap", "    # more may follow",
          "    'b': [1, 2]"],
         ["  select_recompute: False  # patterns"]),
        (("recompute_config", "select_recompute"), {r"feed_forward\.mul": [1, 0], "b": [1, 2]},
         ["  select_recompute: # patterns", r"    'feed_forward\.mul': True   # cheap", "    # more may follow",
          "    'b': [1, 2]"],
         ["  select_recompute:  # patterns", r"    'feed_forward\.mul': [1, 0]", "    b: [1, 2]"]),
        (("recompute_config", "mp_comm_recompute"), False, ["  mp_comm_recompute:"], ["  mp_comm_recompute: False"]),
        (("recompute_config", "note"), {"k": 1}, ['  note: "x"  # quoted'], ["  note:  # quoted", "    k: 1"]),
        (("recompute_config", "more"), 1, ["  more: |", "    text", "    more text"], ["  more: 1"]),
        (("recompute_config", "new"), [[1], [2]], [], ["  new: [[1], [2]]"]),
        (("parallel", "pipeline_config", "pipeline_interleave"), True, [],
         ["parallel:", "  pipeline_config:", "    pipeline_interleave: True"]),
        (("empty", "a", "b"), 3, [], ["  a:", "    b: 3"]),
        (("other",), 3, ["other: *degrees"], ["other: 3"]),
        (("recompute_config", "recompute"), [6, 3, 2, 3], [], []),
        (("parallel_config", "pipeline_stage"), 4, [], []),
    ],
)  # fmt: skip
def test_only_the_named_value_changes(path, value, gone, come):
    assert changed({path: value}) == (gone, come)


def test_several_changes_at_once():
    gone, come = changed({("recompute_config", "a"): 1, ("recompute_config", "b"): [2], ("model", "model_config"): 3})
    assert come == ["  a: 1", "  b: [2]", "  model_config: 3"]
    assert gone == ["  model_config: {type: LlamaConfig, offset: 0}"]


def test_a_value_that_an_alias_shares_is_refused():
    with pytest.raises(EvenloadError) as caught:
        changed({("parallel_config", "pipeline_stage"): 8})
    assert "cannot be changed without changing something else" in caught.value.fact
    assert caught.value.where == "s.yaml:3:19"


def test_a_merged_value_gets_its_own_entry():
    text = "base: &base\n  a: 1\nmine:\n  <<: *base\n  b: 2\n"
    assert changed({("mine", "a"): 5}, text) == ([], ["  a: 5"])


def test_a_path_through_a_list_is_refused():
    with pytest.raises(EvenloadError, match=r"s.yaml:1:4: a is no mapping"):
        changed({("a", "b"): 1}, "a: [1]\n")


@pytest.mark.parametrize(
    "text", ["a: 1", "a: 1\n", "a: 1  # end", "a:\n  - 1\n  -\n", "a:\n  b:\n", "a: {}\n", "a: {b: 1,}\n"]
)
def test_entries_are_added_at_the_end_of_any_text(text):
    after = edit(parse_yaml(text), {("z",): 1, ("y", "x"): [1]})
    assert parse_yaml(after).data == parse_yaml(text).data | {"z": 1, "y": {"x": [1]}}
    assert after.startswith(text.rstrip("\n"))


def test_windows_line_ends_stay():
    text = "a: 1\r\nb:\r\n  c: 2\r\n"
    after = edit(parse_yaml(text), {("b", "d"): {"e": True}, ("a",): [1, 2]})
    assert after == "a: [1, 2]\r\nb:\r\n  c: 2\r\n  d:\r\n    e: true\r\n"


def test_true_is_written_as_the_file_writes_it():
    assert changed({("b",): True}, "a: false\n") == ([], ["b: true"])
    assert changed({("b",): True}, "a: False\n") == ([], ["b: True"])


keys = st.text("abc._-# :'\"{", min_size=1, max_size=4)
values = st.recursive(
    st.one_of(st.integers(-5, 5), st.booleans(), st.none(), st.text("ab: #'\"[-\n", max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, min_size=1, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(keys, values, min_size=1, max_size=4), st.lists(keys, min_size=1, max_size=3), values)
def test_any_change_of_any_text_gives_what_was_asked_or_is_refused(data, path, value):
    text = block(data)
    source = parse_yaml(text)
    assert source.data == data
    found = data
    for step in path:  # a path may only end in, or leave, what is a mapping
        if not isinstance(found, dict) and found is not None:
            with pytest.raises(EvenloadError, match="is no mapping"):
                edit(source, {tuple(path): value})
            return
        found = (found or {}).get(step)
    found = parse_yaml(edit(source, {tuple(path): value})).data
    for step in path:
        found = found[step]
    assert found == value
