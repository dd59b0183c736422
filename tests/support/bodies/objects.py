"""What objects and metrics between ranks must do: programs for every rank."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from support.arrays import array_of
from support.bodies.point_to_point import check_words, expect
from support.spmd_job import meet

import fsdpcore as fc


def same(one: Any, other: Any) -> bool:
    """Whether two objects are equal, type for type and bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (np.ndarray, np.generic)):
        kinds = one.dtype == other.dtype and one.shape == other.shape
        return kinds and one.tobytes() == other.tobytes()
    if type(one) is float:
        return struct.pack("d", one) == struct.pack("d", other)
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is dict:
        return same(list(one.items()), list(other.items()))
    return bool(one == other)


FINE = 0.25 + 2.0**-40  # which float32 does not have
NAN = struct.unpack("<d", b"\1\0\0\0\0\0\xf4\xff")[0]  # with a payload


def _sample(rank: int, size: int) -> Any:
    """An object of rank ``rank``, of roughly ``size`` bytes; the last rank's are the largest."""
    values = array_of(rank, (size // 8, 2), np.float32)
    return {
        "rank": rank,
        3: [None, True, -(2**70) - rank, "ä\0€\U0001f600", b"\xff\0", NAN, -0.0],
        "tuple": (rank, (), [], {}),
        "array": values[::2] if rank % 2 else values.T,
        "narrow": np.array([rank, 2.5], ml_dtypes.float8_e4m3fn),
        "scalars": [np.float32(rank), np.array(rank, ml_dtypes.bfloat16), np.zeros((0, 3), "i1")],
        "text": "x" * (size * (rank + 1) // 2),
    }


def collectives(backend: fc.Backend) -> None:
    """Every rank gets the objects that it should, of any size, in the job and in a group of it."""
    p = backend.world_size
    group = backend.sub(range(p)[::-1])
    for here, sizes in ((backend, (1000, 100_000)), (group, (4000,))):
        me, last = here.rank, p - 1
        for size in sizes:
            every = [_sample(rank, size) for rank in range(p)]
            mine = every[me]
            found = fc.broadcast_object(mine if me == last else None, here, root=last)
            assert same(found, every[last])
            if me == last:
                assert found is mine
            else:
                found["array"][...] = 7  # nobody else's
            found = fc.all_gather_object(mine, here, timeout=15)
            assert same(found, every)
            assert found[me] is mine
            gathered = fc.gather_object(mine, here, root=last)
            assert same(gathered, every if me == last else None)
            parts = every if me == 0 else None
            assert same(fc.scatter_object(parts, here, label="parts"), mine)
        assert fc.broadcast_object({me}, here, pickle=True) == {0}
        assert fc.all_gather_object({me}, here, pickle=True) == [{rank} for rank in range(p)]


def messages(backend: fc.Backend) -> None:
    """An object is a message: of a sender and a tag, in order, to oneself too."""
    p, me = backend.world_size, backend.rank
    left, right = (me - 1) % p, (me + 1) % p
    for size in (0, 100_000):
        send = backend.clock.start(
            lambda size=size: fc.send_object(_sample(me, size), backend, right, tag=5), "send"
        )
        assert same(fc.recv_object(backend, left, tag=5), _sample(left, size))
        send.join(60)
    for number in range(3):
        fc.send_object((me, number), backend, right, tag=number)
    status = fc.MessageStatus()
    assert fc.recv_object(backend, fc.ANY, tag=2, status=status) == (left, 2)
    assert (status.source, status.tag) == (left, 2)
    assert fc.recv_object(backend, left, tag=fc.ANY) == (left, 0)
    assert fc.recv_object(backend, fc.ANY, tag=fc.ANY) == (left, 1)
    fc.send_object({me, 9}, backend, me, pickle=True)
    assert fc.recv_object(backend, me, pickle=True) == {me, 9}


def refusals(backend: fc.Backend) -> None:
    """What is wrong is refused by its place before anything is sent, and the job goes on."""
    me, p = backend.rank, backend.world_size
    bad = {"a": [1, 2, 3, refusals]}
    for refused, *words in (
        (lambda: fc.all_gather_object(bad, backend), "at ['a'][3]: a function", "pickle=True"),
        (lambda: fc.broadcast_object(bad, backend, root=me), "broadcast_object: at ['a'][3]"),
        (lambda: fc.gather_object(({(1,): 2},), backend), "gather_object: at [0]", "str or int"),
        (lambda: fc.send_object("\ud800", backend, me), "half of a surrogate pair"),
        (lambda: fc.all_gather_object(lambda: 0, backend, pickle=True), "pickle refuses"),
        (lambda: fc.scatter_object([1] * (p + 1), backend, root=me), f"list of {p} objects"),
        (lambda: fc.scatter_object([refusals] * p, backend, root=me), "of rank 0: a function"),
        (lambda: fc.broadcast_object(1, backend, root=p), f"rank {p} is not in"),
        (lambda: fc.broadcast_object(1, backend, pickle=1), "True or False"),
        (lambda: fc.average_metrics({"loss": "low"}, backend), "'loss' must be a real number"),
        (lambda: fc.average_metrics({"loss": 1}, backend, weight=-1), "weight must be at least 0"),
    ):
        check_words(expect(fc.ArgumentError, refused), *words)
    assert fc.all_gather_object(me, backend) == list(range(p))


Call = Callable[[fc.Backend], Any]


def _reversed(backend: fc.Backend) -> fc.Backend:
    """The group of all ranks in which each has another number than in the job."""
    return backend.sub(range(backend.world_size)[::-1])


# What all ranks but the last call, what the last one does, and words of the error.
DIFFERENCES: dict[str, tuple[Call, Call, tuple[str, ...]]] = {
    "root": (
        lambda b: fc.broadcast_object("a", b, root=0),
        lambda b: fc.broadcast_object("b", b, root=1),
        ("root 0", "root 1", "for broadcast_object"),
    ),
    "pickle": (
        lambda b: fc.all_gather_object("a", b, pickle=True),
        lambda b: fc.all_gather_object("a", b),
        ("for all_gather_object, pickled", "for all_gather_object)"),
    ),
    "operation": (
        lambda b: fc.all_gather_object("a", b),
        lambda b: fc.gather_object("a", b),
        ("for all_gather_object", "for gather_object"),
    ),
    "pickle of a message": (
        lambda b: fc.send_object("a", b, b.world_size - 1, pickle=True),
        lambda b: fc.recv_object(b, 0),
        ("rank 0 has sent an object with pickle=True", "with pickle=False"),
    ),
    "an array for an object": (
        lambda b: _reversed(b).send(np.ones(20, np.uint8), 0),
        lambda b: fc.recv_object(_reversed(b), b.world_size - 1),
        ("rank 0 has sent an array, uint8 of shape (20,)",),
    ),
    "metrics": (
        lambda b: fc.average_metrics({"loss": 1.0, "f1": 2, "a": np.ones(3)}, b),
        lambda b: fc.average_metrics({"loss": 1.0, "hits": 2, "a": np.ones(2)}, b),
        ("'f1' is missing on rank 1", "'hits' is missing on rank 0", "'a' has the shape (3,)"),
    ),
    "shapes of metrics": (
        lambda b: fc.average_metrics({"loss": 1.0, "f1": 2}, b, missing="skip"),
        lambda b: fc.average_metrics({"loss": [1.0]}, b, missing="skip"),
        ("'loss' has the shape () on rank 0, but (1,) on rank 1",),
    ),
}


def difference(backend: fc.Backend, kind: str) -> None:
    """All ranks raise it, at the latest in their next call."""
    most, last, words = DIFFERENCES[kind]
    call = last if backend.rank == backend.world_size - 1 else most

    def calls() -> None:
        call(backend)
        backend.recv(np.empty(1), (backend.rank + 1) % backend.world_size)

    check_words(expect(fc.MismatchError, calls), *words)
    meet()


def _forged(body: bytes, size: int, room: int) -> Any:
    return np.frombuffer((struct.pack("<3sBQ", b"FCO", 0, size) + body).ljust(room, b"\0"), "u1")


# What rank 0 does, which is no sender of objects, and how rank 1 receives them.
FORGERIES: dict[str, tuple[Call, Call]] = {
    "a message": (
        lambda b: b.send(_forged(b"?", 1, 13), 1),
        lambda b: fc.recv_object(b, 0),
    ),
    "a message in a group": (
        lambda b: _reversed(b).send(_forged(b"?", 1, 13), 0),
        lambda b: fc.recv_object(_reversed(b), 1),
    ),
    "a message of another size": (
        lambda b: b.send(_forged(b"N", 2**62, 13), 1),
        lambda b: fc.recv_object(b, 0),
    ),
    "a broadcast": (
        lambda b: fc.broadcast(np.zeros(4096, np.uint8), b, label="broadcast_object"),
        lambda b: fc.broadcast_object(None, b),
    ),
    "a broadcast of too much": (
        lambda b: fc.broadcast(_forged(b"N", 2**63, 4096), b, label="broadcast_object"),
        lambda b: fc.broadcast_object(None, b),
    ),
    "a broadcast of more than there is": (
        lambda b: fc.broadcast(_forged(b"N", 2**46, 4096), b, label="broadcast_object"),
        lambda b: fc.broadcast_object(None, b),
    ),
    "a gathered one": (
        lambda b: fc.all_gather_v(_forged(b"", 99, 12), b, label="all_gather_object"),
        lambda b: fc.all_gather_object(None, b),
    ),
    "gathered bytes behind": (
        lambda b: fc.gather_v(_forged(b"N", 1, 14), b, root=1, label="gather_object"),
        lambda b: fc.gather_object(None, b, root=1),
    ),
}


def forgery(backend: fc.Backend, kind: str) -> None:
    """Bytes that are no object break the job, and nothing else comes of them."""
    call = FORGERIES[kind][backend.rank]

    def calls() -> None:
        call(backend)
        backend.recv(np.empty(1), 1 - backend.rank)

    wrong = fc.ProtocolError if backend.rank else fc.PeerFailedError
    words = "there is no memory" if "there is" in kind else "these bytes are no"
    sender = "from rank 1: " if "behind" in kind else "from rank 0: "
    check_words(expect(wrong, calls), sender, words)
    meet()


def metrics(backend: fc.Backend) -> None:
    """The weighted average of fractions, rounded once; the same bits everywhere."""
    p, me = backend.world_size, backend.rank
    weights = [4 * rank for rank in range(p)]
    wide = [np.arange(6).reshape(2, 3) + rank for rank in range(p)]

    def average(values: list[Any], who: range = range(p)) -> float:
        total = sum(weights[rank] for rank in who)
        parts = [Fraction(values[rank]) * weights[rank] for rank in who]
        return float(sum(parts) / total) if total else np.nan

    mine = {
        "loss": FINE + me,
        "hits": np.int32(me),
        "half": ml_dtypes.bfloat16(me),
        "wide": wide[me].astype(np.float32),
        "0-d": np.array(2.0),
        "true": me % 2 == 0,
    }
    if me == 0:  # of no rows
        mine["loss"] = np.nan
    names = list(mine)[:: 1 if me % 2 else -1]
    found = fc.average_metrics({name: mine[name] for name in names}, backend, weight=weights[me])
    assert list(found) == names
    expected = {
        "loss": average([FINE + rank for rank in range(p)]),
        "hits": average(list(range(p))),
        "half": average(list(range(p))),
        "0-d": 2.0 if p > 1 else np.nan,
        "true": average([rank % 2 == 0 for rank in range(p)]),
    }
    for name, value in expected.items():
        assert type(found[name]) is float
        np.testing.assert_equal(found[name], value)
    at = [average([int(each.flat[place]) for each in wide]) for place in range(6)]
    assert found["wide"].dtype == np.float64
    np.testing.assert_array_equal(found["wide"], np.reshape(at, (2, 3)))
    assert fc.average_metrics({}, backend) == {}

    own = {"all": float(me), f"of {me % 2}": me, **({"of the last": 1} if me == p - 1 else {})}
    found = fc.average_metrics(own, backend, weight=weights[me], missing="skip", timeout=15)
    expected = {"all": average(list(range(p))), "of the last": 1.0 if p > 1 else np.nan}
    for odd in range(min(p, 2)):
        expected[f"of {odd}"] = average(list(range(p)), range(odd, p, 2))
    np.testing.assert_equal(found, expected)
    assert list(found)[: len(own)] == list(own)
