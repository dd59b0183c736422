"""A rank of an elastic job that has no arrays: it speaks with its agent, in JSON, and no more.

It prints what it hears: ``in NUMBER RANK SIZE PID MEETING HOSTS``. Where the ranks meet, rank 0
says by the socket that it has inherited, and all others as they were told; the hosts are the
addresses of agents. It hands over whenever that is wanted. SIGUSR1 has it end its program, as if
all ranks had; SIGUSR2 has it blame the last rank for the end of its backend.

It imports nothing of the package.
"""

import json
import os
import signal
import socket
import sys


def say(*words: object) -> None:
    """Print a line in one piece."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main() -> None:
    """Do what the agent wants, until that is over."""
    descriptor = int(os.environ["FSDPCORE_ELASTIC"].partition(":")[0])
    agent = socket.socket(fileno=descriptor)
    number = size = 0

    def tell(kind: str, **fields: object) -> None:
        agent.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def finish(signal_number: int, frame: object) -> None:
        tell("finished", number=number)
        os._exit(0)

    def blame(signal_number: int, frame: object) -> None:
        tell("broken", number=number, suspects=[size - 1], reason="it does not answer")

    signal.signal(signal.SIGUSR1, finish)
    signal.signal(signal.SIGUSR2, blame)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    tell("ready")
    for line in agent.makefile():
        message = json.loads(line)
        kind = message["kind"]
        if kind == "generation":
            number, place = message["generation"]["number"], message["place"]
            meeting, size = place["meeting"], place["world_size"]
            if place["rank"] == 0:
                with socket.socket(fileno=os.dup(place["listener_fd"])) as listener:
                    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    meeting = "{}:{}".format(*listener.getsockname())
            tell("joined", number=number)
            hosts = ",".join(address for _, address, _ in message["generation"]["hosts"])
            say("in", number, place["rank"], size, os.getpid(), meeting, hosts)
        elif kind == "change":
            tell("paused", number=number, commit=1, leaves=message["leaves"])
        else:
            say(kind, os.getpid())
            sys.exit(1 if kind == "stop" else 0)


if __name__ == "__main__":
    main()
