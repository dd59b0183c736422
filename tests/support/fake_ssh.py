"""A program that behaves as ssh and sshd do: a command runs on this host as if on another.

::

    ssh [-T] [-o OPTION]... HOST COMMAND...

The words of the command are joined for a shell, which runs in a session of its own, in another
directory, with another environment. It is no child that ends with ssh: when ssh is killed, the
command sees the end of its input and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

MARK = "TEST_JOB_MARK"  # by which tests find all processes of a job
HOST = "FAKE_HOST"


def install(folder: Path) -> dict[str, str]:
    """Make a program ``ssh`` of this in a folder; return the environment in which it is found."""
    program = folder / "ssh"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "{__file__}" "$@"\n')
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def _relay(source: int, sink: int) -> None:
    try:
        while data := os.read(source, 1 << 16):
            os.write(sink, data)
    except OSError:
        pass  # the command has ended
    if sink > 2:
        os.close(sink)


def main(arguments: list[str]) -> int:
    while arguments[0].startswith("-"):
        arguments = arguments[1 + (arguments[0] == "-o") :]
    host, *words = arguments
    if host.startswith("down"):
        print(f"ssh: connect to host {host} port 22: No route to host", file=sys.stderr, flush=True)
        return 255
    kept = {MARK: os.environ.get(MARK, ""), HOST: host, "PATH": os.defpath, "HOME": "/"}
    # What some shells print at the start of a session.
    shell = ["sh", "-c", f"echo welcome to {host}; {' '.join(words)}"]
    pipe = subprocess.PIPE
    command = subprocess.Popen(
        shell, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/", env=kept, start_new_session=True
    )
    told = os.dup(command.stdin.fileno())
    command.stdin.close()
    ends = [(0, told), (command.stdout.fileno(), 1), (command.stderr.fileno(), 2)]
    relays = [threading.Thread(target=_relay, args=each, daemon=True) for each in ends]
    for relay in relays:
        relay.start()
    for relay in relays[1:]:
        relay.join()
    code = command.wait()
    return 255 if code < 0 else code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # without a word to those that still read
