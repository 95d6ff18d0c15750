"""The examples of the page on recording give what the page shows."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "recording.md"


def test_the_page_on_recording_is_true():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 8
    assert result.failed == 0
