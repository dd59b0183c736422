"""What ranks tell each other beside messages, as JSON: why one fails, and what it does."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Any, Protocol

from fsdpcore.core.errors import (
    CommunicationError,
    MismatchError,
    PeerFailedError,
    ProtocolError,
)


class Notice(Protocol):
    """A control message that has arrived."""

    @property
    def kind(self) -> enum.Enum:
        """What it is for."""

    @property
    def payload(self) -> Any:
        """Its bytes."""


def pack_json(content: Mapping[str, Any]) -> bytes:
    """Encode the payload of a control message."""
    return json.dumps(content).encode()


def unpack_json(notice: Notice) -> dict[str, Any]:
    """Decode the payload of a control message.

    Raises:
        ProtocolError: it is no JSON object.
    """
    try:
        content = json.loads(bytes(notice.payload))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the payload of a {notice.kind.name} message is not JSON") from error
    if not isinstance(content, dict):
        raise ProtocolError(f"the payload of a {notice.kind.name} message is no object")
    return content


def failure_as_json(error: CommunicationError, limit: int) -> dict[str, Any]:
    """Return by what a rank is broken, for its peers, in ``limit`` characters."""
    content: dict[str, Any] = {"kind": type(error).__name__, "reason": str(error)[:limit]}
    if isinstance(error, PeerFailedError) and error.rank is not None:
        content["rank"] = error.rank
        content["pair"] = error.pair
        content["said"] = error.said
    return content


def failure_from_json(content: Mapping[str, Any], world_size: int) -> CommunicationError:
    """Return by what a peer in a job of ``world_size`` ranks says that it is broken."""
    reason, culprit = str(content.get("reason", "no reason given")), content.get("rank")
    if content.get("kind") == MismatchError.__name__:
        return MismatchError(reason)
    if _is_rank(culprit, world_size):
        pair = content.get("pair")
        if (
            isinstance(pair, list)
            and len(pair) == 2
            and all(_is_rank(rank, world_size) for rank in pair)
        ):
            return PeerFailedError(reason, culprit, pair=(pair[0], pair[1]))
        return PeerFailedError(reason, culprit, said=content.get("said") is True)
    return CommunicationError(reason)


def _is_rank(value: object, world_size: int) -> bool:
    return type(value) is int and 0 <= value < world_size
