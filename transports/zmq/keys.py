"""What only the ranks of a job know: keys and names, derived from its secret.

The secret itself never travels. HKDF (RFC 5869, with SHA-256) makes of it, and of the job's id, the
long-term key pairs of the listening sockets, and the names under which the ranks know each other's
connections.

Who connects to a listening socket needs its public key for CURVE's first message, and who listens
needs the secret one to answer it (CurveZMQ, ZeroMQ's RFC 26). Neither key is ever sent, so either
proves that it knows the job's secret. Both ends add keys of their own for the one connection.
What was recorded of a job is of no use, then: not for another connection, nor, to who learns the
secret later, for reading it.

The names of connections also depend on a number that rank 0 draws and tells under encryption when
the ranks meet. A rank of an earlier job with the same secret knows none of them.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

import zmq
from zmq.utils import z85

NONCE_BYTES = 32
# 16 hexadecimal digits are 64 random bits.
MIN_SECRET_CHARACTERS = 16


class KeyPair(NamedTuple):
    """The long-term keys of a listening socket, in ZeroMQ's notation (z85, 40 characters)."""

    public: bytes
    secret: bytes


class JobKeys:
    """Keys of a job.

    Args:
        token: the job's secret; empty for none, where anybody may come.
        job: its id, if the launcher gives one.
    """

    def __init__(self, token: str, job: str = "") -> None:
        salt = hashlib.sha256(f"fsdpcore job {job}".encode(errors="replace")).digest()
        self._root = hmac.digest(salt, token.encode(errors="replace"), "sha256")

    def meeting(self) -> KeyPair:
        """The keys of the socket where rank 0 lets the others meet."""
        return _pair(self._derive(b"meeting"))

    def listening(self, rank: int) -> KeyPair:
        """The keys of the socket where the others connect to ``rank``."""
        return _pair(self._derive(b"rank %d" % rank))

    def agents(self) -> KeyPair:
        """The keys of the sockets where the agents of an elastic job listen."""
        return _pair(self._derive(b"agent"))

    def link_name(self, src: int, dst: int, nonce: bytes) -> bytes:
        """What rank ``src`` calls itself when it connects to rank ``dst``: 24 bytes."""
        # ZeroMQ keeps names that begin with a zero for itself.
        return b"fc" + self._derive(b"link %d %d " % (src, dst) + nonce)[:22]

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.digest(self._root, b"fsdpcore " + purpose + b"\x01", "sha256")


def _pair(secret: bytes) -> KeyPair:
    encoded = z85.encode(secret)
    return KeyPair(zmq.curve_public(encoded), encoded)
