"""A plugin for pytest: what is wrong with a test is told when it is found, not at the end.

The tests on a GPU have a limit of time, and the end may not come.
"""

from __future__ import annotations

from typing import Any


class Instant:
    """Writes to the terminal of a run."""

    def __init__(self, config: Any) -> None:
        self._terminal: Any = config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Tell why a test, or what it needs, has failed."""
        if report.failed and self._terminal is not None:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"--- {report.nodeid} ({report.when})")
            self._terminal.write_line(report.longreprtext)


def pytest_configure(config: Any) -> None:
    """Join in."""
    config.pluginmanager.register(Instant(config), "instant")
