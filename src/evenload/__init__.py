"""evenload fits, balances and proves the memory of large-model training."""

from evenload._version import __version__
from evenload.errors import EvenloadError
from evenload.plan.layer_setting import LayerSetting

__all__ = ["EvenloadError", "LayerSetting", "__version__"]
