"""The table of what was measured."""

from dataclasses import replace

from tests.profile.measuring import measured

from evenload.report.profile import profile_text


def test_every_kind_has_a_line_for_every_choice():
    text = profile_text(measured())
    assert "1 thread in each of 2 processes at once" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("Block")]
    assert [line[1] for line in lines] == ["none", "full"]
    assert lines[1][4:] == ["31", "(27.9-34.1)"]
    assert "OMP_NUM_THREADS=1" in text


def test_what_is_sent_is_measured_stated_or_unknown():
    assert "100 B from rank to rank: 0.2 (0.18-0.22) ms" in profile_text(measured())
    assert "100 ms, as stated" in profile_text(measured(bandwidth=1e3))
    assert "not measured by one process" in profile_text(measured(transfer=None))


def test_a_busy_machine_is_told():
    for share, told in ((None, False), (0.97, False), (0.4, True)):
        found = measured(conditions=replace(measured().conditions, share=share))
        assert ("Other programs had the processors for 60% of the time" in profile_text(found)) is told
