"""How long a program takes, on a machine that others use too."""

import resource
import subprocess
from collections.abc import Sequence


def processor_seconds(command: Sequence[str]) -> float:
    """Processor time of a command: the best of three, because waiting for a processor is not the command's doing."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(3))
