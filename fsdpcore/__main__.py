"""``python -m fsdpcore`` is the ``fsdpcore`` command."""

from fsdpcore.cli import app

if __name__ == "__main__":
    app(prog_name="fsdpcore")
