"""Addresses of hosts as text: ``HOST:PORT``, an IPv6 host in brackets."""

from __future__ import annotations

import ipaddress

from fsdpcore.core.errors import ConfigError


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
