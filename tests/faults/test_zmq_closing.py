"""How backends end: with messages on their way, in every order, and without leaving anything."""

from __future__ import annotations

import errno
import gc
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.zmq import memory as zmq_memory
from fsdpcore.transports.zmq.backend import ZmqBackend
from support import fake_cuda
from support.zmq_ranks import PATIENCE, Outcome, config, listener, place, run_threads

import fsdpcore as fc
from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import ClosedError, CommunicationError, PeerFailedError, RendezvousError
from fsdpcore.launch.config import resolve

LARGE = 2_000_000  # bytes: offered first, in several segments
LEFT = "rank 1 has left the job"
SENDING = "send of uint8 ({},) to rank 1 (tag 0)"


def results(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes), outcomes
    return [outcome.result for outcome in outcomes]


def both(first: Callable[[Any], Any], second: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Run one body on rank 0, the other on rank 1; return what they return."""
    return results(run_threads(lambda b: (second if b.rank else first)(b), 2, **options))


def caught(work: Callable[[], Any]) -> str:
    with pytest.raises(PeerFailedError) as error:
        work()
    assert error.value.rank == 1
    return str(error.value)


def test_small_messages_that_nobody_receives_hold_nobody_up() -> None:
    def body(backend: ZmqBackend) -> None:
        for tag in range(100):
            backend.send(np.ones(100), 1 - backend.rank, tag=tag)
        backend.barrier()

    results(run_threads(body, 2))


def test_a_large_message_that_nobody_receives_fails_when_its_receiver_leaves() -> None:
    def sender(backend: ZmqBackend) -> str:
        return caught(lambda: backend.send(np.ones(LARGE, np.uint8), 1))

    # The receiver may have left before the sender sends, or after.
    said = both(sender, lambda backend: None)[0]
    assert said in (LEFT, f"{LEFT} while rank 0 waits in {SENDING.format(LARGE)}")


def test_two_that_leave_with_large_messages_for_each_other_do_not_wait_for_ever() -> None:
    def body(backend: ZmqBackend) -> None:
        backend.isend(np.ones(LARGE, np.uint8), 1 - backend.rank)
        backend.barrier()

    results(run_threads(body, 2))


@pytest.mark.parametrize("shm", ["auto", "off"])
def test_close_waits_until_a_large_message_is_taken(shm: str) -> None:
    data = np.arange(LARGE, dtype=np.uint8)

    def sender(backend: ZmqBackend) -> None:
        backend.isend(data, 1, tag=3)
        backend.isend(data[::-1], 1, tag=4)

    def receiver(backend: ZmqBackend) -> list[bool]:
        time.sleep(0.3)  # the sender closes meanwhile
        first, second = np.empty_like(data), np.empty_like(data)
        backend.recv(second, 0, tag=4)
        backend.recv(first, 0, tag=3)
        return [bool((first == data).all()), bool((second == data[::-1]).all())]

    assert both(sender, receiver, shm=shm)[1] == [True, True]


def test_who_leaves_after_a_lent_message_is_told_when_it_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last thing that comes from it is read before all is copied."""
    monkeypatch.setattr(zmq_memory, "_COPY_BYTES", 1 << 20)
    posted = threading.Event()

    def sender(backend: ZmqBackend) -> float:
        data = backend.empty(8 << 20, np.uint8)
        posted.wait(PATIENCE)
        backend.isend(data, 1)
        began = time.monotonic()
        backend.close()
        return time.monotonic() - began

    def receiver(backend: ZmqBackend) -> None:
        pending = backend.irecv(np.empty(8 << 20, np.uint8), 0)
        with backend.lock:
            posted.set()
            time.sleep(0.2)
        pending.wait()
        time.sleep(1.0)

    assert both(sender, receiver)[0] < 0.9


def test_a_receiver_that_leaves_in_the_middle_of_a_message() -> None:
    def sender(backend: ZmqBackend) -> str:
        return caught(lambda: backend.send(np.ones(400_000_000, np.uint8), 1))

    def receiver(backend: ZmqBackend) -> None:
        out = np.zeros(400_000_000, np.uint8)
        backend.irecv(out, 0)
        while out[0] == 0:
            time.sleep(0.001)
        backend.close()
        seen = out.sum(dtype=np.int64)
        time.sleep(0.1)
        assert out.sum(dtype=np.int64) == seen, "written to after close()"

    assert (
        both(sender, receiver)[0] == f"{LEFT} while rank 0 waits in {SENDING.format(400_000_000)}"
    )


def test_a_receive_from_a_rank_that_leaves() -> None:
    def waiter(backend: ZmqBackend) -> list[str]:
        first = caught(lambda: backend.recv(np.empty(3), 1))
        return [first, caught(backend.barrier), caught(lambda: backend.send(np.ones(3), 1))]

    found = both(waiter, lambda backend: None)[0]
    assert found[0].startswith(LEFT)
    assert found == found[:1] * 3


@pytest.mark.parametrize("early", [True, False])
def test_a_receive_from_any_rank_ends_when_all_others_have_left(early: bool) -> None:
    """Even those that this rank has never talked to."""

    def body(backend: ZmqBackend) -> str:
        if backend.rank:
            time.sleep(0.1 if early else 0.0)
            return ""
        time.sleep(0.0 if early else 0.3)
        with pytest.raises(PeerFailedError) as error:
            backend.recv(np.empty(3), fc.ANY)
        return str(error.value)

    assert "have left the job, all that could send" in results(run_threads(body, 6))[0]


def test_a_rank_that_left_is_missed_only_when_it_is_needed() -> None:
    def body(backend: ZmqBackend) -> float:
        backend.barrier()
        if backend.rank == 2:
            return 0.0
        time.sleep(0.1)
        pair = backend.sub([0, 1])
        return float(fc.all_reduce(np.ones(100_000), pair)[0])

    assert results(run_threads(body, 3)) == [2.0, 2.0, 0.0]


def test_close_wakes_a_thread_that_waits() -> None:
    def body(backend: ZmqBackend) -> str:
        found: list[str] = []

        def wait() -> None:
            try:
                backend.recv(np.empty(3), 1 - backend.rank)
            except ClosedError as error:
                found.append(str(error))
            except PeerFailedError:  # if the other rank was faster
                found.append("left")

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        backend.close()
        thread.join(PATIENCE)
        return found[0]

    for text in results(run_threads(body, 2)):
        assert "was closed" in text or text == "left"


def test_abort_wakes_a_thread_that_waits() -> None:
    def body(backend: ZmqBackend) -> str:
        if backend.rank == 0:
            timer = threading.Timer(0.1, backend.abort, ["enough"])
            timer.start()
        with pytest.raises(CommunicationError) as error:
            backend.recv(np.empty(3), 1 - backend.rank)
        if backend.rank == 0:
            timer.join()
        return str(error.value)

    assert results(run_threads(body, 2)) == ["enough", "rank 0 failed: enough"]


def test_closing_twice_and_calling_after_it() -> None:
    def body(backend: ZmqBackend) -> None:
        backend.barrier()
        backend.close()
        backend.close()
        with pytest.raises(ClosedError):
            backend.send(np.ones(3), 1 - backend.rank)
        with pytest.raises(ClosedError):
            backend.barrier()

    results(run_threads(body, 2))


# Nothing is left behind.


def left_behind() -> tuple[set[str], int]:
    names = {thread.name for thread in threading.enumerate()}
    # pyzmq's own thread, which lives as long as the process after the first large message.
    return {name for name in names if "arbage" not in name}, len(os.listdir("/proc/self/fd"))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Compare threads and descriptors before and after."""

    def warm_up(backend: ZmqBackend) -> None:
        fc.all_reduce(np.ones(LARGE, np.uint8), backend)

    results(run_threads(warm_up, 2))  # what pyzmq makes once
    gc.collect()
    threads, descriptors = left_behind()
    yield
    end = time.monotonic() + 10.0
    while left_behind() != (threads, descriptors) and time.monotonic() < end:
        gc.collect()  # tracebacks keep backends, and these what is left of their memory
        time.sleep(0.01)  # a helper thread of the test itself
    assert left_behind() == (threads, descriptors)


def well(backend: ZmqBackend) -> None:
    fc.all_reduce(np.ones(LARGE, np.uint8), backend)
    backend.barrier()


def aborted(backend: ZmqBackend) -> None:
    with pytest.raises(CommunicationError):  # at once, if another rank was faster
        work = backend.isend(np.ones(LARGE, np.uint8), (backend.rank + 1) % backend.world_size)
        if backend.rank == 0:
            backend.abort("enough")
        work.wait()


def asynchronous(backend: ZmqBackend) -> None:
    group = backend.sub(range(backend.world_size))
    works = [fc.all_reduce(np.ones(LARGE, np.uint8), b, async_op=True) for b in (backend, group)]
    for work in works:
        work.wait()


def failing(backend: ZmqBackend) -> None:
    fc.all_reduce(np.ones(3 + backend.rank), backend)


@pytest.mark.parametrize("body", [well, aborted, asynchronous, failing])
@pytest.mark.usefixtures("nothing_left")
def test_a_job_leaves_nothing(body: Callable[[ZmqBackend], None]) -> None:
    errors = {outcome.error for outcome in run_threads(body, 3)}
    assert errors == ({"MismatchError"} if body is failing else {""})


def join(rank: int, **options: Any) -> None:
    with listener() as meeting:
        here = place(rank, 2, meeting.getsockname()[1], "token", None if rank else meeting)
        ZmqBackend.join(here, config(rendezvous_timeout=0.3, **options))


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_finds_nobody_leaves_nothing() -> None:
    for rank in range(2):
        with pytest.raises(RendezvousError):
            join(rank)
    with pytest.raises(RendezvousError):
        join(1, interface="192.0.2.1", security="none")


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_without_a_meeting_point_leaves_nothing() -> None:
    with pytest.raises(fc.ConfigError, match="does not say where the ranks can meet"):
        ZmqBackend.join(RankPlace(0, 2, 0, 2, "a test"), config())


@pytest.mark.parametrize("scheme", ["zmq", "nccl"])
@pytest.mark.parametrize("there", [True, False])
def test_what_to_do_where_mpirun_names_no_meeting_point(
    scheme: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own scheme; and MPI, where ranks need no GPU and it is not there."""
    original, found = importlib.util.find_spec, importlib.util.find_spec("zmq") if there else None
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: found if name == "mpi4py" else original(name, package),
    )
    by_mpi = RankPlace(0, 2, 0, 2, "mpirun", mpi=True)
    with (
        fake_cuda.installed(1) if scheme == "nccl" else nullcontext(),
        pytest.raises(fc.ConfigError) as caught,
    ):
        given = resolve({"transport": scheme}, {})
        given.transport_class.join(by_mpi, given)
    assert f"--transport {scheme}://HOST:PORT" in str(caught.value)
    assert ("mpi4py" in str(caught.value)) == (scheme == "zmq" and not there)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", ["_address_of", "check_security", "_card", "JobKeys"])
def test_a_rank_that_runs_out_of_something_leaves_nothing(
    step: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "too many files")

    where = "backend" if step == "JobKeys" else "joining"
    monkeypatch.setattr(f"fsdpcore.transports.zmq.{where}.{step}", broken)
    with listener() as meeting, pytest.raises(OSError, match="too many files"):
        here = place(rank, 4, meeting.getsockname()[1], "token", None if rank else meeting)
        ZmqBackend.join(here, config(rendezvous_timeout=0.3))


@pytest.mark.usefixtures("nothing_left")
def test_a_single_rank_leaves_nothing() -> None:
    with ZmqBackend.join(RankPlace(0, 1, 0, 1, "a test"), config()) as backend:
        assert fc.all_reduce(np.ones(3), backend).tolist() == [1.0] * 3


@pytest.mark.usefixtures("nothing_left")
def test_the_others_hear_of_a_rank_that_fails_while_it_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = ZmqBackend._measure

    def broken(self: ZmqBackend, *args: Any) -> None:
        original(self, *args)
        if self.rank == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(ZmqBackend, "_measure", broken)
    outcomes = run_threads(lambda backend: backend.barrier(), 3)
    assert outcomes[1].error == "KeyboardInterrupt"
    for outcome in (outcomes[0], outcomes[2]):
        assert (outcome.error, outcome.culprit) == ("PeerFailedError", 1)
        assert "rank 1 did not join: KeyboardInterrupt" in outcome.text
