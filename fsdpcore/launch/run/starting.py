"""The processes of ranks that run a script: what they find, and where they print."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Callable, Mapping, Sequence

from fsdpcore.launch import secret
from fsdpcore.launch.config import Config
from fsdpcore.launch.environment import LAUNCH_VARIABLES
from fsdpcore.launch.output import OutputPipes, RankOutput
from fsdpcore.launch.supervision import RankProcess


def shared_environment(
    config: Config, environ: Mapping[str, str], token: str, job: str
) -> dict[str, str]:
    """The environment of all ranks of a host: what this process has, and what it is to be."""
    shared = {name: value for name, value in environ.items() if name not in LAUNCH_VARIABLES}
    shared["FSDPCORE_TRANSPORT"] = config.transport
    shared[secret.TOKEN], shared[secret.JOB] = token, job
    return shared


class Starter:
    """Starts the processes of ranks.

    Args:
        command: program and arguments.
        environ: of all of them.
        output, pipes: what takes their lines, and where they write these; None lets them print.
        rank_0_reads: rank 0 has the standard input of this process, all others have none.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: RankOutput | None,
        pipes: OutputPipes | None,
        *,
        rank_0_reads: bool,
    ) -> None:
        self._command = command
        self._environ = dict(environ)
        if output is not None:  # or lines would come when a rank ends
            self._environ.setdefault("PYTHONUNBUFFERED", "1")
        self._output = output
        self._pipes = pipes
        self._rank_0_reads = rank_0_reads

    def __call__(
        self, rank: int, variables: Mapping[str, str], descriptors: Sequence[int] = ()
    ) -> RankProcess:
        """Start rank ``rank`` with ``variables`` besides; it inherits ``descriptors``."""
        with contextlib.ExitStack() as stack:
            ends: Sequence[int | None] = (None, None)
            if self._pipes is not None:
                ends = stack.enter_context(self._pipes.ending_in(*self._handlers(rank)))
            return RankProcess(
                rank,
                self._command,
                environ={**self._environ, **variables},
                pass_fds=descriptors,
                stdin=None if rank == 0 and self._rank_0_reads else subprocess.DEVNULL,
                stdout=ends[0],
                stderr=ends[1],
            )

    def _handlers(self, rank: int) -> list[Callable[[bytes], None]]:
        assert self._output is not None
        return [functools.partial(self._output.write, rank, error) for error in (False, True)]
