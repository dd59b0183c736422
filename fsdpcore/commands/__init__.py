"""The subcommands of ``fsdpcore`` that have a module of their own."""
