"""``python -m fsdpcore`` is the ``fsdpcore`` command."""

from fsdpcore.commands.main import app

if __name__ == "__main__":
    app(prog_name="fsdpcore")
