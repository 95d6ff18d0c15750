from __future__ import annotations

import pytest
from tests.processes import by_scenario, together
from tests.runtime import pair


@pytest.fixture(scope="session")
def both(tmp_path_factory):
    """What a scenario of `pair` found, on both ranks."""
    folder = tmp_path_factory.mktemp("pair")
    return by_scenario(together(pair.main, pair.RANKS, folder, str(folder), limit=300))
