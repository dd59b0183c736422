"""Start the ranks, or join them: threads, processes, launchers, configuration."""
