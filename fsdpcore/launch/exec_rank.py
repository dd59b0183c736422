"""First program of a rank's process: it ties its life to its launcher's, then becomes the rank.

``supervision`` runs this file by its path, as ``exec_rank.py LAUNCHER_PID PROGRAM ARGUMENTS…``, in
an interpreter without site packages: a few milliseconds. Doing it between fork and exec instead
would run Python in a forked copy of a process that has threads, which may deadlock.
"""

from __future__ import annotations

import os
import signal
import sys


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (on Linux).

    That outlives ``exec``. If the parent was gone before the kernel was asked, end now.
    """
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 (no shell is wanted)
