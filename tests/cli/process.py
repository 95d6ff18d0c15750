"""Running evenload as a program of its own, from the tree that is tested, on a machine that others use too."""

import os
import sys


def environment() -> dict[str, str]:
    """The environment in which a program finds the modules that this process finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
