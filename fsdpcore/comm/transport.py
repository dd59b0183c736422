"""``Transport``: what every transport shares, and what it must implement.

A transport is a ``Backend`` of a whole job. It implements ``post_send`` and ``post_recv`` (never
blocking), and the hooks of ``Job``; sends and receives that block, collectives, groups,
asynchronous operations, deadlines and error reports come from the base classes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fsdpcore.comm.agents import AgentLinks
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.config import TransportConfig
from fsdpcore.comm.job import Job
from fsdpcore.comm.place import RankPlace
from fsdpcore.core.algorithm import Algorithm
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.errors import UnsupportedError
from fsdpcore.core.policy import Policy
from fsdpcore.diagnostics.status import WORLD_CHANNEL, Group


@functools.lru_cache(maxsize=8)
def _everyone(world_size: int) -> tuple[int, ...]:
    """All ranks of a job: one tuple for those of this process."""
    return tuple(range(world_size))


class Transport(Job, Backend):
    """Base of the transports; see the module docstring for what a new one implements.

    Attributes:
        ranks_are_threads: ``launch`` starts the ranks as threads, through ``threads``; otherwise
            as processes, each of which calls ``join``.
        needs_launcher: its ranks are processes that a launcher of its own starts, such as mpirun.
        not_elastic: why its ranks, as processes, cannot come and go while a job runs.
        takes_address: its URLs may name ``HOST:PORT``.
        options: a frozen dataclass with the options of this transport's URLs and their defaults;
            fields of type int, float, bool and str can be given as text.
        transport_capabilities: what it can do, but for what depends on the options.
        alike: of a rank that is played for all others: how long their collectives take together.
            None for a rank among others.
    """

    ranks_are_threads: ClassVar[bool] = False
    needs_launcher: ClassVar[bool] = False
    not_elastic: ClassVar[str] = "it lacks what their agents need"
    takes_address: ClassVar[bool] = False
    options: ClassVar[type[Any]]
    transport_capabilities: Capabilities
    alike: Any = None

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        *,
        hosts: Sequence[int] | None = None,
        policy: Policy | None = None,
    ) -> None:
        group = Group(WORLD_CHANNEL, _everyone(world_size))
        Backend.__init__(self, group, rank, hosts or [0] * world_size)
        Job.__init__(self, timeout, policy)
        self.recorder.add_group(self.order)

    @property
    def root(self) -> Transport:
        return self

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        shares = self.memory is not None and self.memory.available
        return dataclasses.replace(self.transport_capabilities, shared_window=shares)

    # How ranks come into being.

    @classmethod
    def threads(cls, world_size: int, config: TransportConfig) -> list[Transport]:
        """Make the backends of all ranks, for ranks that are threads of this process."""
        raise NotImplementedError(f"{cls.__name__} has no ranks_are_threads")

    @classmethod
    def check_meeting(cls, address: tuple[str, int], token: str, config: TransportConfig) -> None:
        """Refuse what ranks would that meet at ``address``; a launcher asks before it starts any.

        Raises:
            ConfigError: says why.
        """

    @classmethod
    def link_agents(
        cls, address: tuple[str, int], token: str, config: TransportConfig
    ) -> AgentLinks:
        """Let an agent of an elastic job, one whose ranks come and go, listen for the others.

        Args:
            address: where to listen; port 0 takes a free one.
            token: the secret of the job.
            config: of its ranks.

        Raises:
            UnsupportedError: ranks of this transport can't come and go.
            ConfigError: the job needs a secret.
            RendezvousError: the address cannot be listened at.
        """
        scheme = cls.transport_capabilities.transport
        raise UnsupportedError(
            f"--elastic: ranks of transport {scheme!r} cannot come and go while a job runs: "
            f"{cls.not_elastic}; use another transport, such as zmq"
        )

    @classmethod
    def join(cls, place: RankPlace, config: TransportConfig) -> Transport:
        """Become rank ``place.rank``, for ranks that are processes. Blocks until all are there.

        Raises:
            RendezvousError: some did not come in time, or they disagree about the job.
        """
        raise NotImplementedError(f"{cls.__name__} ranks are threads; use launch()")

    @classmethod
    def versions(cls) -> str:
        """Say in a few words which libraries this transport runs on, for ``fsdpcore doctor``."""
        return ""

    def algorithms(self, backend: Backend) -> Mapping[str, Mapping[str, Algorithm]]:
        """Return this transport's own algorithms by collective and name, for a group of its ranks.

        Equal on all ranks of the group; does not communicate. Their functions have the signature
        of those in ``collectives/algorithms``. Those that communicate by other means than the
        context that they are given say so by ``comparison=Comparison.NOT_AT_ALL``: then the ranks
        meet before them.
        """
        return {}

    def close(self) -> None:
        if self.forked:
            return
        broken = self.failure is not None
        self._end_operations()
        self._release(flush=not broken)
        for region in list(self.regions):  # the collector may take others meanwhile
            region.close()
        self.regions.clear()
        if self.memory is not None:
            self.memory.close()


def transport_of(backend: Backend) -> Transport:
    """Return the transport that carries a backend's messages."""
    root = backend.root
    assert isinstance(root, Transport), "a job is made by a transport"
    return root
