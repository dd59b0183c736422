"""Links between agents over ZeroMQ: what arrives, what is kept, and whom they don't let in."""

from __future__ import annotations

import contextlib
import select
import time

import pytest
from fsdpcore.transports.zmq.agents import ZmqAgentLinks
from support.jobs import PATIENCE

from fsdpcore.launch.addresses import parse_address

HERE = ("127.0.0.1", 0)


@pytest.fixture
def link():
    """Make the links of an agent."""
    with contextlib.ExitStack() as stack:

        def make(secret, address=HERE):
            return stack.enter_context(contextlib.closing(ZmqAgentLinks(address, secret)))

        yield make


def until(done, *agents):
    """Serve agents until ``done(messages)``; return what came to the first one."""
    end, found = time.monotonic() + PATIENCE, []
    while True:
        for agent in agents:
            taken = agent.take()
            found += taken if agent is agents[0] else []
        if done(found):
            return found
        assert time.monotonic() < end
        poller = select.poll()
        for agent in agents:
            for descriptor in agent.watched():
                poller.register(descriptor, select.POLLIN)
        poller.poll(1000)


def test_messages_come_in_order_with_their_senders_address(link):
    one, two = link("the same secret"), link("the same secret")
    for number in range(40):
        one.send(two.address, {"number": number})
    found = until(lambda found: len(found) == 40, two, one)
    assert found == [(one.address, {"number": number}) for number in range(40)]
    two.send(one.address, {"deep": [{"a": None}, "ü", 1.5]})
    assert until(bool, one, two) == [(two.address, {"deep": [{"a": None}, "ü", 1.5]})]
    assert not one.refused()


def test_who_has_another_secret_is_not_heard_and_told_so(link):
    one, two = link("the same secret"), link("another secret")
    two.send(one.address, {"number": 1})
    until(lambda _: two.refused() == {one.address}, two, one)
    one.send(two.address, {"number": 2})
    until(lambda _: one.refused() == {two.address}, one, two)
    assert not one.take()
    assert not two.take()


def test_the_newest_messages_are_kept_for_an_agent_that_comes(link):
    one, two = link("the same secret"), link("the same secret")
    address = two.address
    two.close()
    for number in range(1000):
        one.send(address, {"number": number})
    again = link("the same secret", parse_address(address))
    found = until(lambda found: found and found[-1][1]["number"] == 999, again, one)
    assert 10 < len(found) < 200
    assert [message["number"] for _, message in found] == list(range(1000))[-len(found) :]
