"""Files that are wrong in every way end in one clear error."""

import json

import pytest

from evenload.errors import EvenloadError
from evenload.files import MAX_BYTES, parse_json, read_json, read_text, refuse_existing, write_text


def test_text_is_read_without_its_byte_order_mark(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes("\ufeffa: \u00fc\n".encode())
    assert read_text(file) == "a: \u00fc\n"


@pytest.mark.parametrize(
    ("content", "fact", "place"),
    [
        (b"", "the file is empty", ""),
        (b" \n\t\n", "the file is empty", ""),
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe\xb0", "binary file", ""),
        (b"a: 1\x00", "binary file", ""),
        ("a: 1".encode("utf-16"), "UTF-16", ""),
        (b"a: 1\nname: Stra\xdfe\n", "byte 0xdf", ":2:11"),
    ],
)
def test_content_that_is_not_text_is_named_with_its_place(tmp_path, content, fact, place):
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with pytest.raises(EvenloadError) as caught:
        read_text(file)
    assert fact in caught.value.fact
    assert caught.value.where == f"{file}{place}"
    assert caught.value.exit_code == 2


def test_missing_files_and_directories_are_told_apart(tmp_path):
    with pytest.raises(EvenloadError, match="there is no such file"):
        read_text(tmp_path / "none.yaml")
    with pytest.raises(EvenloadError, match="this is a directory"):
        read_text(tmp_path)
    with pytest.raises(EvenloadError, match="cannot read the file"):
        read_text(tmp_path / "a\0b")
    (tmp_path / "file").write_text("x")
    with pytest.raises(EvenloadError, match="cannot read the file: not a directory"):
        read_text(tmp_path / "file" / "below")


def test_a_file_without_end_is_not_read_whole():
    with pytest.raises(EvenloadError, match=f"larger than {MAX_BYTES // 2**20} MiB"):
        read_text("/dev/zero")


@pytest.mark.parametrize(
    ("text", "fact", "where"),
    [
        ('{"a": 1,\n "b": }', "not valid JSON: Expecting value", "t.json:2:7"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice", "t.json"),
        ('{"a": NaN}', "NaN is not a number", "t.json"),
        ('{"a": -Infinity}', "-Infinity is not a number", "t.json"),
        ('{"a": 1e999}', "1e999 is not a number", "t.json"),
        ('{"a": ' + "9" * 5000 + "}", "thousands of digits", "t.json"),
        ("[" * 100_000, "nested too deeply", "t.json"),
        ("a: 1", "not valid JSON", "t.json:1:1"),
    ],
)
def test_json_is_read_strictly(text, fact, where):
    with pytest.raises(EvenloadError) as caught:
        parse_json(text, name="t.json")
    assert fact in caught.value.fact
    assert caught.value.where == where


def test_json_values_come_back(tmp_path):
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    file = tmp_path / "a.json"
    file.write_text(json.dumps(value))
    assert read_json(file) == value


def test_writing_makes_directories_and_never_replaces_without_force(tmp_path):
    file = tmp_path / "new" / "deep" / "plan.yaml"
    write_text(file, "a: 1\n")
    with pytest.raises(EvenloadError, match="would be overwritten") as caught:
        write_text(file, "b: 2\n")
    assert caught.value.fix is not None
    assert "--force" in caught.value.fix
    assert file.read_text() == "a: 1\n"
    write_text(file, "b: 2\n", force=True)
    assert file.read_text() == "b: 2\n"
    assert list(file.parent.iterdir()) == [file], "no temporary file is left"


def test_a_new_file_has_the_usual_mode_and_a_replaced_one_keeps_its_own(tmp_path):
    file = tmp_path / "a"
    plain = tmp_path / "b"
    plain.touch()
    write_text(file, "1")
    assert file.stat().st_mode == plain.stat().st_mode
    file.chmod(0o600)
    write_text(file, "2", force=True)
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_link_keeps_pointing_at_the_written_file(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    write_text(link, "new", force=True)
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_writing_onto_a_directory_or_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(EvenloadError, match="this is a directory"):
        write_text(tmp_path, "x", force=True)
    with pytest.raises(EvenloadError, match="cannot write the file"):
        write_text(tmp_path / "file" / "below", "x")


def test_a_place_that_takes_no_files_is_found_before_long_work(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(EvenloadError, match="file is a file, not a directory"):
        refuse_existing(tmp_path / "file" / "deep" / "out.json", force=True)
    refuse_existing(tmp_path / "new" / "deep" / "out.json", force=False)
    refuse_existing("/dev/stdout", force=False)
    assert not (tmp_path / "new").exists()
