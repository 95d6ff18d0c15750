"""What errors carry, and what led to them."""

from __future__ import annotations

from evenload.errors import behind


def test_what_led_to_an_error_is_told_once_even_in_a_ring():
    outer, inner = ValueError("outer"), KeyError("inner")
    outer.__cause__, inner.__context__ = inner, outer
    assert list(behind(outer)) == [outer, inner]
    outer.__cause__ = outer
    assert list(behind(outer)) == [outer]
    assert list(behind(None)) == []
