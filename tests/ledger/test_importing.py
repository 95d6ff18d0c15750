"""Files are told apart by what is in them."""

from pathlib import Path

import pytest
from tests.ledger.ledgers import step
from tests.ledger.snapshots import dump, snapshot, training

from evenload.errors import EvenloadError
from evenload.ledger.files import write_ledger
from evenload.ledger.importing import read_allocations

DATA = Path(__file__).parents[1] / "data" / "ledger"


def test_every_kind_is_read_whatever_its_name(tmp_path):
    write_ledger(tmp_path / "a.bin", step())
    dump(tmp_path / "b.bin", snapshot(training()))
    (tmp_path / "c.bin").write_bytes((DATA / "memory_block_2.7.csv").read_bytes())
    origins = [read_allocations(tmp_path / name).metadata.origin for name in ("a.bin", "b.bin", "c.bin")]
    assert origins == ["recorded", "torch snapshot", "MindSpore memory tracker"]


def test_other_files_are_wrong_input(tmp_path):
    for name, content, says in (
        ("empty", b"", "is empty"),
        ("text", b"hello world", "holds no allocations"),
        ("zip", b"PK\x03\x04 a checkpoint", "holds no allocations"),
        ("bytes", bytes(range(256)), "holds no allocations"),
        ("cut", b"\x80\x04\x95", "damaged"),
        ("ledger", b"evenload-ledger\n", "truncated"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(EvenloadError, match=says):
            read_allocations(path)
    with pytest.raises(EvenloadError, match="no such file"):
        read_allocations(tmp_path / "nothing")
    with pytest.raises(EvenloadError, match="cannot read"):
        read_allocations("a\0b")


def test_a_directory_names_the_files_in_it(tmp_path):
    with pytest.raises(EvenloadError, match="name a file inside it"):
        read_allocations(tmp_path)
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "memory_block.csv").touch()
    (tmp_path / "run.ledger").touch()
    with pytest.raises(EvenloadError, match=r"memory_block\.csv, run\.ledger"):
        read_allocations(tmp_path)
