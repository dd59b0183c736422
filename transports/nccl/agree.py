"""Whether the ranks of a group call the same on their GPUs, found out behind their backs.

The host does not wait for the other ranks at every call, so it cannot compare before. Instead every
rank tells the next one of the group, now and then, what it has called so far: how many calls, one
number that all of them went into, and the last of them in words. A rank that finds another number
at the same place breaks the job, on all ranks, with the calls of both in words.

It reads the other rank's words when it has called as much itself; a call that waits for the other
ranks on the host, since it is the first of its kind, counts.

All of this is called by the supervisor of ``nccl/supervisor.py``, except for ``Agreement.heard``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend
from fsdpcore.core.disagreement import check_same
from fsdpcore.core.errors import MismatchError, ProtocolError

if TYPE_CHECKING:
    from fsdpcore.collectives.spec import CallSpec

# Calls that a rank can still compare, and those that it tells in words.
_REMEMBERED, _WORDS = 256, 8
# What others have told that this rank has not come to: of one group, and groups in all.
_AHEAD, _GROUPS = 16, 1024
_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15  # odd, so that no call is lost by being multiplied


class PeerCalls(NamedTuple):
    """What a rank has told of its calls in a group.

    Attributes:
        rank: who, in the whole job.
        sequence: how many calls it has made.
        sum: the number that all of them went into.
        last: number, digest and words of its last calls.
    """

    rank: int
    sequence: int
    sum: int
    last: tuple[tuple[int, int, str], ...]


class _Past(NamedTuple):
    sequence: int
    sum: int
    spec: CallSpec


@dataclass
class _Ledger:
    """The calls of one group on this rank."""

    group: Backend
    sequence: int = 0
    sum: int = 0
    told: int = 0
    past: deque[_Past] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def at(self, sequence: int) -> _Past | None:
        """The call of a number, as long as it is remembered."""
        behind = self.sequence - sequence
        return self.past[-1 - behind] if 0 <= behind < len(self.past) else None


class Agreement:
    """What one rank knows of the calls of its own GPU and of others'.

    Args:
        rank: in the whole job.
        tell: sends what is to be told to a rank, without waiting.
    """

    def __init__(self, rank: int, tell: Callable[[int, dict[str, Any]], None]) -> None:
        self._rank = rank
        self._tell = tell
        self._ledgers: dict[int, _Ledger] = {}
        # Of groups that are not used any more: their ranks, and the number of calls.
        self._gone: dict[int, tuple[tuple[int, ...], int]] = {}
        self._ahead: dict[int, deque[PeerCalls]] = {}
        self._heard: deque[tuple[int, PeerCalls]] = deque()

    @property
    def waits(self) -> bool:
        """Whether others have told of calls that this rank has not made yet."""
        return bool(self._heard or self._ahead)

    def called(self, group: Backend, spec: CallSpec, sequence: int) -> None:
        """Note a call of this rank: the next one of its group."""
        ledger = self._ledgers.get(group.channel)
        if ledger is None:
            ledger = self._ledgers[group.channel] = _Ledger(group)
        ledger.sequence = sequence
        ledger.sum = (ledger.sum * _MIX + spec.digest) & _MASK
        ledger.past.append(_Past(sequence, ledger.sum, spec))

    def sequence(self, channel: int) -> int:
        """How many calls this rank has made in a group; 0 for one that it does not know."""
        ledger = self._ledgers.get(channel)
        return self._gone.get(channel, ((), 0))[1] if ledger is None else ledger.sequence

    def calls(self) -> list[tuple[int, tuple[int, ...], int]]:
        """The channels and ranks of groups in which this rank has called something; how often."""
        open_yet = [
            (channel, ledger.group.ranks, ledger.sequence)
            for channel, ledger in self._ledgers.items()
        ]
        return open_yet + [(channel, *found) for channel, found in self._gone.items()]

    def forget(self, channel: int) -> None:
        """A group is not used any more."""
        self.tell()
        ledger = self._ledgers.pop(channel, None)
        if ledger is not None:
            self._gone[channel] = ledger.group.ranks, ledger.sequence
        self._ahead.pop(channel, None)

    # With the others.

    def tell(self) -> None:
        """Tell of the calls that have not been told of."""
        for ledger in self._ledgers.values():
            group = ledger.group
            if ledger.told == ledger.sequence or group.world_size == 1:
                continue
            ledger.told = ledger.sequence
            following = group.ranks[(group.rank + 1) % group.world_size]
            last = list(ledger.past)[-_WORDS:]
            self._tell(
                following,
                {
                    "channel": group.channel,
                    "sequence": ledger.sequence,
                    "sum": ledger.sum,
                    "last": [[p.sequence, p.spec.digest, str(p.spec.fingerprint)] for p in last],
                },
            )

    def heard(self, rank: int, content: Mapping[str, Any]) -> None:
        """Take note of what another rank has told; may be called by any thread.

        Raises:
            ProtocolError: no rank would tell that.
        """
        numbers = [content.get(name) for name in ("channel", "sequence", "sum")]
        last = content.get("last")
        if not (all(type(n) is int for n in numbers) and isinstance(last, list)):
            raise ProtocolError(f"rank {rank} tells of its calls what makes no sense")
        if not all(
            isinstance(item, list) and [type(part) for part in item] == [int, int, str]
            for item in last
        ):
            raise ProtocolError(f"rank {rank} tells of its last calls what makes no sense")
        channel, sequence, total = (int(n or 0) for n in numbers)
        calls = tuple((item[0], item[1], item[2]) for item in last)
        self._heard.append((channel, PeerCalls(rank, sequence, total, calls)))

    def compare(self) -> None:
        """Compare what was heard with what this rank has called.

        Raises:
            MismatchError: they differ; says how.
        """
        while self._heard:
            channel, told = self._heard.popleft()
            if channel in self._gone:
                continue
            if channel not in self._ahead and len(self._ahead) >= _GROUPS:
                del self._ahead[next(iter(self._ahead))]
            ahead = self._ahead.setdefault(channel, deque())
            if len(ahead) >= _AHEAD:
                ahead.pop()  # the new one says all that this did, but for its words
            ahead.append(told)
        for channel in list(self._ahead):
            self._compare(channel)

    def _compare(self, channel: int) -> None:
        ahead, ledger = self._ahead[channel], self._ledgers.get(channel)
        while ledger is not None and ahead and ahead[0].sequence <= ledger.sequence:
            told = ahead.popleft()
            own = ledger.at(told.sequence)
            if own is not None and own.sum != told.sum:
                self._refuse(ledger, told)
        if not ahead:
            del self._ahead[channel]
        elif ledger is not None:
            self._compare_running(ledger.group, ahead)

    def _compare_running(self, group: Backend, ahead: deque[PeerCalls]) -> None:
        """Compare the call that this rank is in, which waits for the others before it is enqueued.

        Those that do not wait may have called something else long ago.
        """
        context = state_of(group).context
        entry, spec = getattr(context, "entry", None), getattr(context, "spec", None)
        if entry is None or spec is None or entry.end or entry.call is not spec.record:
            return
        for told in ahead:
            for sequence, digest, words in told.last:
                if sequence == entry.sequence and digest != spec.digest:
                    self._compare_words(sequence, told.rank, words, str(spec.fingerprint))

    def _refuse(self, ledger: _Ledger, told: PeerCalls) -> None:
        """Raise the error of a rank that called something else."""
        for sequence, digest, words in told.last:
            own = ledger.at(sequence)
            if own is not None and own.spec.digest != digest:
                self._compare_words(sequence, told.rank, words, str(own.spec.fingerprint))
        raise MismatchError(
            f"the collectives of GPU arrays in {ledger.group.group} do not fit together: those of "
            f"ranks {told.rank} and {self._rank} differ somewhere before #{told.last[0][0]}"
        )

    def _compare_words(self, sequence: int, rank: int, theirs: str, own: str) -> None:
        found = sorted([(rank, theirs), (self._rank, own)])
        check_same(
            [[call] for call in found],
            [who for who, _ in found],
            lambda difference: difference.lines(f"collective #{sequence} of GPU arrays"),
            words=lambda call: str(call[1]),
        )
