"""Every exception that fsdpcore raises.

::

    FsdpcoreError
    ├── ConfigError (ValueError)             an option, URL or variable is wrong
    │   ├── UnknownTransportError            no transport has that scheme
    │   └── MissingDependencyError           the transport's extra is not installed
    ├── ArgumentError (ValueError)           a call's arguments are wrong; nothing was sent
    ├── UnsupportedError                     this transport cannot do that
    ├── StateError (RuntimeError)            calls in an order that the engine does not allow
    ├── NonFiniteGradientError (ArithmeticError)  inf or nan in a norm; nothing was updated
    ├── CommunicationError (RuntimeError)    the backend is broken from here on
    │   ├── RendezvousError                  the ranks did not find each other
    │   ├── CommTimeoutError (TimeoutError)  a deadline passed
    │   ├── MismatchError                    ranks called different things
    │   ├── PeerFailedError                  another rank failed or is gone
    │   ├── ProtocolError                    bytes that no rank of this job would send
    │   ├── ClosedError                      the backend was closed
    │   └── ElasticError                     an elastic job does not go on
    ├── CheckpointError (RuntimeError)       a checkpoint could not be written or read
    │   ├── CorruptCheckpointError           it is not what was written, or was not finished
    │   └── CheckpointNotFoundError          there is none
    └── RankFailedError (RuntimeError)       what ``launch`` raises when a rank failed
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ClosedError",
    "CommTimeoutError",
    "CommunicationError",
    "ConfigError",
    "CorruptCheckpointError",
    "ElasticError",
    "FsdpcoreError",
    "MismatchError",
    "MissingDependencyError",
    "NonFiniteGradientError",
    "PeerFailedError",
    "ProtocolError",
    "RankFailedError",
    "RendezvousError",
    "StateError",
    "UnknownTransportError",
    "UnsupportedError",
]


def __dir__() -> list[str]:
    return __all__


class FsdpcoreError(Exception):
    """Base of every exception of this package."""


class ConfigError(FsdpcoreError, ValueError):
    """An option, a transport URL, an environment variable or a configuration file is wrong."""


class UnknownTransportError(ConfigError):
    """No installed transport has the scheme that was asked for."""


class MissingDependencyError(ConfigError):
    """A transport needs what is not installed; the message says what to do.

    ``install`` is the command that helps, empty where none does; None for that of the extra which
    belongs to the transport.
    """

    def __init__(self, message: str, install: str | None = None) -> None:
        super().__init__(message)
        self.install = install


class ArgumentError(FsdpcoreError, ValueError):
    """A call's arguments are wrong. Nothing was sent, the backend stays usable."""


class UnsupportedError(FsdpcoreError):
    """The transport cannot do what was asked; ``backend.capabilities`` says what it can."""


class StateError(FsdpcoreError, RuntimeError):
    """A call came in an order that is not allowed; the message says what was expected."""


class NonFiniteGradientError(FsdpcoreError, ArithmeticError):
    """The gradients hold inf or nan. Every rank raises it, and no parameter was changed.

    ``parameters`` has them, by ``unit.param``, each with the ranks of the job whose own gradients
    were so before the sum over the ranks; none where the sum overflowed, or where it is not known.
    """

    def __init__(
        self, message: str, parameters: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        super().__init__(message)
        self.parameters = dict(parameters or {})


class CommunicationError(FsdpcoreError, RuntimeError):
    """Communication failed. The backend stays broken: later calls raise the first cause again."""


class RendezvousError(CommunicationError):
    """The ranks did not find each other before the deadline, or disagree about the job.

    ``ranks`` are those that did not come, or were lost meanwhile, where they are known.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class CommTimeoutError(CommunicationError, TimeoutError):
    """An operation's deadline passed; the message names it and the ranks that are missing."""


class MismatchError(CommunicationError):
    """Ranks called operations that do not fit together; the message says which and how."""


class PeerFailedError(CommunicationError):
    """Another rank failed, was lost or left while this rank still needed it.

    ``rank`` is that rank in the whole job. Where two ranks live but have lost each other, ``pair``
    has both, and ``rank`` is the lower one. ``said``: the rank itself has said that it fails or
    leaves, so that its process lived then.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        *,
        pair: tuple[int, int] | None = None,
        said: bool = False,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.pair = pair
        self.said = said


class ProtocolError(CommunicationError):
    """A peer sent bytes that no rank of this job would send."""


class ClosedError(CommunicationError):
    """The backend was closed on this rank."""


class ElasticError(CommunicationError):
    """An elastic job does not go on, or not with this rank; the message says why."""


class CheckpointError(FsdpcoreError, RuntimeError):
    """A checkpoint could not be written or read; on all ranks. What was committed before is there.

    The backend stays usable.
    """


class CorruptCheckpointError(CheckpointError):
    """What was found is not what was written, or its writing was never finished."""


class CheckpointNotFoundError(CheckpointError):
    """There is no such checkpoint."""


class RankStopped(BaseException):
    """Raised in a rank that is a thread, and goes on although its job has ended."""


class RankFailedError(FsdpcoreError, RuntimeError):
    """A rank of ``launch`` failed; ``rank`` says which, ``__cause__`` carries its traceback.

    ``misuse``: it was an argument or the configuration that was wrong, so that the message, which
    says what to do, is all that a program needs to show.
    """

    def __init__(self, message: str, rank: int = -1, *, misuse: bool = False) -> None:
        super().__init__(message)
        self.rank = rank  # with a default, so that the error can be copied and pickled
        self.misuse = misuse


def is_misuse(error: BaseException) -> bool:
    """Whether an error is about an argument or the configuration."""
    return isinstance(error, (ArgumentError, ConfigError))


def in_words(error: BaseException) -> str:
    """Return type and text of an error; never raises, whatever the error's own methods do."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def in_one_line(error: BaseException) -> str:
    """Return type and text of an error in one line: the first, and the list that it announces."""
    first, *more = in_words(error).strip().split("\n")
    if not first.rstrip().endswith(":") or not more:
        return first.strip()
    listed = [more[0], *itertools.takewhile(lambda line: line[:1].isspace(), more[1:])]
    return f"{first.strip()} {'; '.join(line.strip() for line in listed)}"
