"""The channel between an agent and a rank's process: lines over a socket."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest

from fsdpcore.elastic.channel import SocketChannel
from fsdpcore.launch.environment import ELASTIC


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_messages_come_whole_and_in_order_however_slowly_they_are_read(pair):
    ours, theirs = map(SocketChannel, pair)
    messages = [{"kind": "k", "number": number, "text": "ü" * number} for number in range(400)]
    for message in messages:
        ours.send(message)  # more than a socket holds: none of it blocks
    assert ours.unsent
    flusher = threading.Thread(target=lambda: ours.receive(None))  # a wait sends the rest
    flusher.start()
    assert [theirs.receive(10) for _ in messages] == messages
    theirs.send({})
    flusher.join()
    assert not ours.unsent
    assert theirs.receive(0) is None


def test_lines_are_cut_where_they_end(pair):
    channel = SocketChannel(pair[0])
    data = b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(3))
    for at in range(len(data)):
        pair[1].sendall(data[at : at + 1])
        if not data[: at + 1].endswith(b"\n"):
            assert channel.receive(0) is None
        else:
            assert channel.receive(0) == {"n": data[: at + 1].count(b"\n") - 1}


def test_the_end_is_told_once_all_is_read(pair):
    ours, theirs = map(SocketChannel, pair)
    ours.send({"last": 1})
    ours.close()
    assert theirs.receive(None) == {"last": 1}
    with pytest.raises(EOFError, match="gone"):
        theirs.receive(None)
    theirs.send({"nobody": "hears"})
    assert not theirs.unsent


def test_only_the_process_that_inherits_it_has_a_channel(pair):
    end = pair[0].detach()
    os.set_inheritable(end, True)
    inode = os.fstat(end).st_ino
    for value in ("", f"{end}:{inode + 1}", "1000000:5", f"x:{inode}"):
        assert SocketChannel.inherited({ELASTIC: value}) is None
    channel = SocketChannel.inherited({ELASTIC: f"{end}:{inode}"})
    assert channel is not None
    assert not os.get_inheritable(end)
    channel.send({"kind": "ready"})
    assert pair[1].recv(100) == b'{"kind":"ready"}\n'
    channel.close()
