"""Hosts as a user names them, and how many ranks each gets."""

from __future__ import annotations

import ipaddress
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


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is one that only this host reaches."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host in ("", "localhost") or host.endswith(".localhost")


def parse_address(text: str) -> tuple[str, int]:
    """Split ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``; the port is 0 where none is named.

    Raises:
        ConfigError: it is none of these.
    """
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, number = text, "0"
    bracketed = host.startswith("[") and host.endswith("]")
    port = int(number) if number.isascii() and number.isdecimal() and len(number) < 6 else 65536
    if not host.strip("[]") or port > 65535 or (":" in host and not bracketed):
        raise ConfigError(f"address {text!r} is not HOST:PORT, an IPv6 host in brackets")
    return host.strip("[]"), port


def join_address(host: str, port: int) -> str:
    """Write an address as ``parse_address`` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_reachable(host: str) -> None:
    """Refuse an address that stands for all of a host's own, where others need one.

    Raises:
        ConfigError: it is one.
    """
    if host in ("0.0.0.0", "::"):  # noqa: S104 (refused)
        raise ConfigError(
            f"ranks of other hosts cannot come to {host}: name an address of the host"
        )
