"""Running evenload as a program of its own, from the tree that is tested, on a machine that others use too."""

import os
import resource
import subprocess
import sys
from collections.abc import Sequence


def environment() -> dict[str, str]:
    """The environment in which a program finds the modules that this process finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def processor_seconds(arguments: Sequence[str]) -> float:
    """Processor time of a Python program: the best of three, because waiting for a processor is not its doing."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True, env=environment())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(3))
