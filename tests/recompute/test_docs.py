"""The examples of the page on recomputation give what the page shows."""

import doctest
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "recompute.md"

pytest.importorskip("transformers")


def test_the_page_on_recomputation_is_true():
    torch.set_num_threads(1)
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 20
    assert result.failed == 0
