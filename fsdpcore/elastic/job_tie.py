"""``JobTie``: which job an agent belongs to, and when it goes over to another one."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpcore.elastic.reports import Report


class JobTie:
    """Which job an agent asks, or founds, and whose messages are of it.

    Args:
        me: the agent's id.
        job: the job's id; empty takes the first that answers.

    Attributes:
        job: as given, or as somebody has told it.
        founder: the id of the agent that has founded it; empty if that is not known.
        hosts: that the founder waits for, which is this agent; 0 if it is not.
        addresses: of the agents that this one asks.
    """

    def __init__(self, me: str, job: str) -> None:
        self.job = job
        self.founder = ""
        self.hosts = 0
        self.addresses: tuple[str, ...] = ()
        self._me = me

    def found(self, hosts: int) -> None:
        """Be the founder."""
        self.founder, self.hosts = self._me, hosts

    def takes(self, job: str, report: Report, generation: int, of_job: Sequence[Report]) -> bool:
        """Whether an agent is of this job, which may take that one's for its own.

        Args:
            job: what it says that it is of.
            report: of that agent.
            generation: the newest that this agent knows; 0 if none.
            of_job: reports of those that are there, and in this job.
        """
        pairs = (job, self.job), (report.founder, self.founder)
        if any(theirs and own and theirs != own for theirs, own in pairs):
            if not self._goes_over(report, generation, of_job):
                return False
            self.job, self.founder, self.hosts = "", "", 0
        self.job = self.job or job
        if report.founder and not self.founder:
            self.founder = report.founder
            self.addresses = tuple(dict.fromkeys((*self.addresses, report.card.address)))
        return True

    def _goes_over(self, report: Report, generation: int, of_job: Sequence[Report]) -> bool:
        """Whether this agent leaves what it asks, or founds, for another job.

        It does not once it knows a generation: two jobs that go on never become one.
        """
        if generation or report.finished:
            return False
        if self.hosts:  # a job goes on whose founder was started again: that joins it
            return report.member
        if any(each.generation for each in of_job):
            return False
        # Its founder was started again before the job began, or has gone over itself.
        return report.is_of_job or report.card.id == self.founder

    def other_witness(self, own: str, of_job: Sequence[Report]) -> str:
        """Why the job will never take this host along; empty if nothing says so.

        Args:
            own: the id of this agent's witness; empty if it has none.
            of_job: as of ``takes``.
        """
        theirs = {report.witness for report in of_job if report.founder == self.founder}
        if not theirs or own in theirs:
            return ""
        if not own:
            what = "the job has a witness, and this host has none"
        elif theirs == {""}:
            what = "the job has no witness, and this host has one"
        else:
            what = "the job has another witness file than this host"
        return f"{what}: --witness must name the same file on all hosts"
