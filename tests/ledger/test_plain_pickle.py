"""A hostile pickle executes nothing."""

import os
import pickle
import pickletools
from pathlib import Path

import pytest

from evenload.errors import EvenloadError
from evenload.ledger.plain_pickle import is_pickle, read_plain_pickle
from evenload.ledger.snapshot import read_snapshot


class Touch:
    """Asks to run something when it is loaded."""

    def __init__(self, function, *arguments):
        self.request = (function, arguments)

    def __reduce__(self):
        return self.request


@pytest.fixture
def witness(tmp_path):
    return tmp_path / "witness"


def hostile(witness):
    command = f"touch {witness}"
    yield pickle.dumps(Touch(os.system, command))
    yield pickle.dumps({"segments": [], "device_traces": [[Touch(Path.touch, Path(witness))]]})
    yield pickle.dumps({"segments": [], "x": Touch(eval, f"open({str(witness)!r}, 'w')")}, protocol=2)
    yield pickle.dumps({"segments": [], "x": Touch(exec, f"open({str(witness)!r}, 'w')")}, protocol=0)
    yield b"cos\nsystem\n(S'" + command.encode() + b"'\ntR."
    yield b"(S'" + command.encode() + b"'\nios\nsystem\n."
    yield b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(command)]) + command.encode() + b"\x85R."
    yield b"\x80\x02}X\x08\x00\x00\x00__dict__}b."
    yield b"\x80\x02\x82\x01."
    yield pickle.dumps(Path("x"))
    yield pickle.dumps(Touch)


def test_nothing_runs_and_the_error_names_what_was_asked_for(tmp_path, witness):
    for number, raw in enumerate(hostile(witness)):
        path = tmp_path / f"{number}.pickle"
        path.write_bytes(raw)
        for read in (read_plain_pickle, read_snapshot):
            with pytest.raises(EvenloadError):
                read(path)
        assert not witness.exists(), number
    assert number == 10


def test_the_witness_would_have_seen_it(tmp_path, witness):
    """The same bytes do run something when they are loaded without care: the test above can fail."""
    raw = next(hostile(witness))
    pickle.loads(raw)
    assert witness.exists()
    path = tmp_path / "evil.pickle"
    path.write_bytes(raw)
    with pytest.raises(EvenloadError, match=r"it asks to run posix\.system, which was refused"):
        read_plain_pickle(path)


def test_plain_data_is_read_in_every_protocol(tmp_path):
    data = {"a": [1, 2.5, None, True, "ü", b"x", (1, (2,))], "b": {"c": 2**40}}
    path = tmp_path / "plain.pickle"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        raw = pickle.dumps(data | ({"b": 1} if protocol < 3 else {}), protocol)
        if protocol < 3:  # bytes need a function there
            raw = pickle.dumps({"a": [1, 2.5, None, True, "ü"]}, protocol)
        path.write_bytes(raw)
        assert read_plain_pickle(path) == pickle.loads(raw)
        assert is_pickle(path) == (protocol >= 2)


def test_damaged_pickles_are_wrong_input(tmp_path):
    path = tmp_path / "damaged.pickle"
    raw = pickletools.optimize(pickle.dumps({"segments": [{"device": 0, "blocks": list(range(50))}]}))
    for cut in range(len(raw)):
        path.write_bytes(raw[:cut])
        with pytest.raises(EvenloadError):
            read_plain_pickle(path)
    for at in range(0, len(raw), 3):
        path.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
        try:
            read_plain_pickle(path)
        except EvenloadError:
            continue


def test_files_that_are_not_there_are_wrong_input(tmp_path):
    with pytest.raises(EvenloadError, match="no such file"):
        read_plain_pickle(tmp_path / "no.pickle")
    with pytest.raises(EvenloadError, match="directory"):
        read_plain_pickle(tmp_path)
    assert not is_pickle(tmp_path / "no.pickle")
