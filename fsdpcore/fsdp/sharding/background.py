"""``Background``: a thread of a rank for what is more than a collective."""

from __future__ import annotations

from collections.abc import Callable

from fsdpcore.comm.job import Job
from fsdpcore.core.errors import CommunicationError, in_words
from fsdpcore.core.work import TaskWork


class Background:
    """Runs tasks one after the other; a task that fails breaks the job.

    So it is with a collective, too: the other ranks wait for what does not come, and whatever the
    task should have written is not there.

    Args:
        root: the rank's backend.
        name: of the thread.
    """

    def __init__(self, root: Job, name: str) -> None:
        self._root = root
        self._executor = root.new_executor(name)

    def submit(self, task: Callable[[], None], label: str) -> TaskWork:
        """Queue a task; never blocks. What goes wrong in it is raised by ``wait``, too."""

        def run() -> None:
            try:
                task()
            except CommunicationError:  # has broken it
                raise
            except BaseException as error:
                self._break(f"{label} failed: {in_words(error)}")
                raise

        return self._executor.submit(run, label)

    def run(self, task: Callable[[], None], label: str) -> None:
        """Have a task done, and wait for it; an interrupt meanwhile breaks the job.

        The task goes on then, and writes to arrays that whoever is interrupted gives up.
        """
        work = self.submit(task, label)
        try:
            work.wait()
        except BaseException as error:
            if not work.done():
                self._break(f"{label} was interrupted: {in_words(error)}")
            raise

    def _break(self, why: str) -> None:
        root = self._root
        root.fail(CommunicationError(f"rank {root.rank}: {why}"), tell=True)

    def close(self) -> None:
        """End the thread, after what is queued."""
        self._root.end_executor(self._executor)
