"""Hosts as a user names them, and how many ranks each gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fsdpcore.core.errors import ConfigError


class HostShare(NamedTuple):
    """A host, as the launcher names it, and the ranks that it gets."""

    name: str
    ranks: int

    @property
    def address(self) -> str:
        """The name without a user's, and without the brackets around an IPv6 address."""
        return self.name.rpartition("@")[2].strip("[]")


def parse_hosts(text: str, total: int | None) -> list[HostShare]:
    """Read ``a,b:4,user@c``: hosts, some with a number of ranks.

    Args:
        text: what the user wrote.
        total: ranks in all; None where nothing says. What is left of them is shared evenly by the
            hosts without a number, the first ones having one more where it does not divide.

    Raises:
        ConfigError: the text is no such list, or the numbers do not fit together.
    """
    given = [_split(item.strip()) for item in text.split(",")]
    names = [name for name, _ in given]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"--hosts {text}: {twice} is there twice; write {twice}:N for N ranks")
    known = sum(count or 0 for _, count in given)
    open_ones = [name for name, count in given if count is None]
    if total is None:
        if open_ones:
            raise ConfigError(
                f"how many ranks? Say so with -n, or for each host, as in --hosts {names[0]}:4"
            )
        total = known
    rest = total - known
    if rest < len(open_ones) or (rest and not open_ones):
        raise ConfigError(
            f"--hosts {text} does not fit -n {total}: "
            + (
                f"{known} ranks have a host, {rest} are left for {', '.join(open_ones)}"
                if open_ones
                else f"the hosts get {known} ranks"
            )
        )
    extra = {name: index < rest % len(open_ones) for index, name in enumerate(open_ones)}
    return [
        HostShare(name, rest // len(open_ones) + extra[name] if count is None else count)
        for name, count in given
    ]


def _split(item: str) -> tuple[str, int | None]:
    """``HOST`` or ``HOST:N``, an IPv6 address in brackets."""
    name, colon, number = item.rpartition(":")
    if not colon or item.endswith("]"):
        name, number = item, ""
    elif not number.isdecimal() or not int(number):
        raise ConfigError(f"--hosts: {item!r} is not HOST or HOST:N, N at least 1")
    # A name that begins with a dash would be an option of ssh.
    if not name or name.startswith("-") or any(c.isspace() for c in name):
        raise ConfigError(f"--hosts: {item!r} names no host")
    if ":" in name and not name.endswith("]"):
        raise ConfigError(f"--hosts: write the address in {item!r} in brackets, as in [fe80::1]:4")
    return name, int(number) if number else None


def host_of(rank: int, shares: Sequence[HostShare]) -> HostShare:
    """The host of a rank: they are filled one after the other."""
    behind = 0
    for share in shares:
        behind += share.ranks
        if rank < behind:
            return share
    raise ValueError(f"no host has rank {rank}")
