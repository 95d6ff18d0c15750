"""Failures of the recorder itself are raised in the tests of the room; a user gets a warning instead."""

import pytest

from evenload.record.recorder import Recorder


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setattr(Recorder, "strict", True)
