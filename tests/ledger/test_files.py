"""A ledger in a file comes back as it was; a file that is none, or not whole, is one clear error."""

import dataclasses
import errno
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ledger.ledgers import random_rows, step

from evenload.errors import EvenloadError
from evenload.ledger import cells
from evenload.ledger.files import is_ledger, read_ledger, write_ledger
from evenload.ledger.ledger import Ledger, Metadata, Owner
from evenload.ledger.log import Log, encode, head, names
from evenload.ledger.reading import decode
from evenload.ledger.words import Hold, Phase


def assert_same(left: Ledger, right: Ledger) -> None:
    for column in dataclasses.fields(left.allocations):
        ours, theirs = (getattr(ledger.allocations, column.name) for ledger in (left, right))
        assert ours.dtype == theirs.dtype, column.name
        np.testing.assert_array_equal(ours, theirs, err_msg=column.name)
    for name in ("metadata", "end", "strings", "devices", "frames", "marks", "host", "owners", "complete"):
        assert getattr(left, name) == getattr(right, name), name


def test_a_written_ledger_reads_back_with_every_column_string_and_mark(tmp_path):
    path = tmp_path / "deep" / "run.ledger"
    write_ledger(path, step())
    ledger = read_ledger(path)
    assert_same(ledger, step())
    assert ledger.notices == ()
    assert is_ledger(path)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_any_ledger_reads_back_the_same(seed, count):
    rng = np.random.default_rng(seed)
    owners = tuple(
        Owner(row=row, hold=Hold(row % len(Hold)), chain="layers.0", source=["pinned", None][row % 2])
        for row in range(0, count, 3)
    )
    ledger = dataclasses.replace(step(), allocations=random_rows(rng, count), end=10**6, owners=owners)
    assert_same(decode(encode(ledger)), ledger)


@given(text=st.text(max_size=300))
@settings(max_examples=100, deadline=None)
def test_strings_of_any_length_and_alphabet_read_back(text):
    log = Log(Metadata(evenload="1", command=(text,)))
    log.string("before")
    log.string(text)
    log.string("after")
    log.close(0)
    expected = text.encode(errors="backslashreplace").decode()
    assert decode(log.encoded()).strings == tuple(dict.fromkeys(["before", expected, "after"]))


def test_links_and_reaches_point_at_their_allocations():
    rows = step().allocations
    previous = np.array([-1, 0, -1, 2, -1, -1])
    reach = np.array([-1, 5, -1, -1, 7, -1])
    ledger = dataclasses.replace(step(), allocations=dataclasses.replace(rows, previous=previous, reach=reach))
    back = decode(encode(ledger)).allocations
    np.testing.assert_array_equal(back.previous, previous)
    np.testing.assert_array_equal(back.reach, reach)


def test_what_was_there_before_comes_first_however_late_it_is_noted():
    log = Log(Metadata(evenload="1"))
    first = head(phase=Phase.OTHER.code, device=log.device("cpu"))
    positions = [log.allocation(first, nbytes, index, 0, 0) for nbytes, index in ((10, 3), (20, 0), (30, 5), (40, 0))]
    log.link(positions[2], positions[0])
    log.link(positions[0], positions[1])
    log.close(6)
    rows = decode(log.encoded()).allocations
    assert rows.nbytes.tolist() == [20, 40, 10, 30]
    assert rows.allocated.tolist() == [0, 0, 3, 5]
    assert rows.previous.tolist() == [-1, -1, 0, 2]


def test_an_existing_file_is_kept_unless_forced(tmp_path):
    path = tmp_path / "run.ledger"
    path.write_text("precious")
    with pytest.raises(EvenloadError, match="exists") as error:
        write_ledger(path, step())
    assert error.value.exit_code == 2
    with pytest.raises(EvenloadError, match="exists"):
        Log(Metadata(evenload="1"), path)
    assert path.read_text() == "precious"
    write_ledger(path, step(), force=True)
    assert len(read_ledger(path).allocations) == 6


def test_a_table_in_a_file_is_readable_at_any_moment_and_grows(tmp_path):
    path = tmp_path / "run.ledger"
    log = Log(Metadata(evenload="1"), path)
    name = log.string("aten.mm")
    device = log.device("cpu")
    first = head(phase=Phase.FORWARD.code, device=device)
    count = 40_000  # more than the first reservation holds
    for index in range(count):
        log.allocation(first, index, index + 1, names(-1, name), 0)
    position = log.allocation(first, 7, count + 1, names(-1, name), 0)
    log.words[position + cells.FREED] = count + 2
    open_ledger = read_ledger(path)
    assert len(open_ledger.allocations) == count + 1
    assert not open_ledger.complete
    assert "did not end by itself" in open_ledger.notices[0].fact
    assert open_ledger.end == count + 3
    log.close(count + 5)
    closed = read_ledger(path)
    assert closed.complete
    assert closed.notices == ()
    assert closed.end == count + 5
    assert path.stat().st_size == len(log.encoded())
    np.testing.assert_array_equal(closed.allocations.nbytes, [*range(count), 7])
    np.testing.assert_array_equal(closed.allocations.freed[-1], count + 2)


def test_a_full_disk_ends_the_file_and_not_the_recording(tmp_path, monkeypatch):
    path = tmp_path / "run.ledger"
    log = Log(Metadata(evenload="1"), path)
    first = head(phase=Phase.OTHER.code, device=log.device("cpu"))

    def full(handle, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("evenload.ledger.log._reserve", full)
    for index in range(40_000):
        log.allocation(first, 1, index + 1, 0, 0)
    assert "no space left on device" in log.problem.fact
    log.close(50_000)
    assert len(log.ledger(50_000).allocations) == 40_000
    kept = read_ledger(path)
    assert not kept.complete
    assert 16_000 < len(kept.allocations) < 16_384  # what fits into the first megabyte
    monkeypatch.undo()
    Log(Metadata(evenload="1"), path, force=True).close(0)
    assert read_ledger(path).complete


def test_a_disk_that_is_full_from_the_start_is_an_error(tmp_path, monkeypatch):
    def full(handle, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("evenload.ledger.log._reserve", full)
    with pytest.raises(EvenloadError, match="no space left on device"):
        Log(Metadata(evenload="1"), tmp_path / "run.ledger")
    assert list(tmp_path.iterdir()) == []


def test_a_file_cut_at_any_byte_is_one_clear_error_or_the_whole(tmp_path):
    whole = encode(step())
    for size in range(len(whole)):
        with pytest.raises(EvenloadError) as error:
            decode(whole[:size], place="run.ledger")
        assert error.value.exit_code == 2
        assert error.value.where == "run.ledger"


def test_a_recording_cut_off_after_any_cell_reads_up_to_there():
    whole = encode(step())
    counts = []
    for size in range(4 * cells.CELL, len(whole) - cells.CELL, cells.CELL):
        padded = whole[:size] + bytes(3 * cells.CELL)
        try:
            ledger = decode(padded)
        except EvenloadError as error:
            assert "without its end" in error.fact  # noqa: PT017  # a text is written whole before its first word is
            continue
        assert not ledger.complete
        counts.append(len(ledger.allocations))
    assert counts == sorted(counts)
    assert counts[-1] == 6


@given(data=st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_foreign_bytes_are_no_ledger(data):
    with pytest.raises(EvenloadError):
        decode(data)


@given(position=st.integers(0, 10**6), value=st.integers(0, 255))
@settings(max_examples=400, deadline=None)
def test_a_damaged_byte_is_read_or_refused_but_never_a_traceback(position, value):
    raw = bytearray(encode(step()))
    raw[position % len(raw)] = value
    try:
        ledger = decode(bytes(raw))
    except EvenloadError:
        return
    for row in range(len(ledger.allocations)):
        ledger.module(row)
        ledger.operator(row)
        ledger.stack(row)


def test_a_mark_of_a_phase_that_does_not_exist_is_damage():
    ledger = step()
    marks = tuple(dataclasses.replace(mark, value=99) for mark in ledger.marks)
    with pytest.raises(EvenloadError, match="unknown phase 99"):
        decode(encode(dataclasses.replace(ledger, marks=marks)))


def test_a_newer_format_says_what_to_do():
    raw = bytearray(encode(step()))
    raw[16] = cells.VERSION + 1
    with pytest.raises(EvenloadError, match=r"format 2, and this evenload reads formats up to 1") as error:
        decode(bytes(raw))
    assert "update" in error.value.fix


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda path: None, "there is no such file"),
        (lambda path: path.mkdir(), "this is a directory"),
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_text("not a ledger"), "this is not a ledger"),
        (lambda path: path.write_bytes(cells.MAGIC), "the ledger is truncated"),
    ],
)
def test_what_is_no_ledger_is_named(tmp_path, make, fact):
    path = tmp_path / "x.ledger"
    make(path)
    with pytest.raises(EvenloadError, match=fact) as error:
        read_ledger(path)
    assert error.value.exit_code == 2


def test_a_ledger_is_known_by_its_first_bytes(tmp_path):
    write_ledger(tmp_path / "a", step())
    (tmp_path / "b").write_text("evenload ledger")
    assert is_ledger(tmp_path / "a")
    assert not is_ledger(tmp_path / "b")
    assert not is_ledger(tmp_path)
    assert not is_ledger(tmp_path / "c")


def test_a_million_events_are_small_and_fast(tmp_path):
    count = 500_000  # each is allocated and freed
    rows = random_rows(np.random.default_rng(0), count)
    ledger = dataclasses.replace(step(), allocations=rows, end=10**9)
    held = sum(getattr(rows, column.name).nbytes for column in dataclasses.fields(rows))
    begin = time.perf_counter()
    path = tmp_path / "big.ledger"
    write_ledger(path, ledger)
    back = read_ledger(path)
    seconds = time.perf_counter() - begin
    assert len(back.allocations) == count
    assert held < 60e6
    assert path.stat().st_size < 40e6
    assert seconds < 5
