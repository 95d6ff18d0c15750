"""evenload fits, balances and proves the memory of large-model training."""

from evenload._version import __version__
from evenload.errors import EvenloadError

__all__ = ["EvenloadError", "__version__"]
