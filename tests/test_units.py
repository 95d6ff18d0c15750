import pytest

from evenload.errors import EvenloadError
from evenload.units import gib, human_bytes, human_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64GiB", 64 * 2**30), ("64 GB", 64 * 10**9), ("53000MB", 53_000_000_000), ("1.5kib", 1536), (12, 12)],
)
def test_sizes_are_read_in_both_unit_systems(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "abc", "64 parsecs", "0", "-3GiB", "0.2B", "1e400GiB", "nan"])
def test_a_wrong_size_is_refused_with_a_fix(text):
    with pytest.raises(EvenloadError) as caught:
        parse_bytes(text, where="--memory")
    assert caught.value.exit_code == 2
    assert caught.value.where == "--memory"
    assert caught.value.fix


def test_sizes_and_times_are_printed_with_their_unit():
    assert gib(3 * 2**30) == "3.00 GiB"
    assert human_bytes(1023) == "1023 B"
    assert human_seconds(0.0456) == "45.6 ms"
