"""``Member``: an agent's part in an elastic job, as a state machine.

Agents are equal, and none is needed. Each tells the others what its seats are about, and hears who
is there. One of them proposes the next generation when something is lost, or when all ranks have
handed over (``term.py``); the agents of the last generation decide (``decree.py``).

A member does no input or output of its own and has no clock: it is told the time, and its driver
takes out what is to be sent and what has happened.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from fsdpcore.elastic.decree import Decree
from fsdpcore.elastic.events import Change, Event, Finished, Install, Note, Stop
from fsdpcore.elastic.generation import Generation, HostCard
from fsdpcore.elastic.here import Here
from fsdpcore.elastic.job_tie import JobTie
from fsdpcore.elastic.mail import Letter, Mail, Message
from fsdpcore.elastic.paxos import Witness
from fsdpcore.elastic.peers import Peers
from fsdpcore.elastic.reports import Report, Terms
from fsdpcore.elastic.succession import View, successor
from fsdpcore.elastic.term import SILENT_SECONDS, Limits, Term

_MOST_LOST = 32  # addresses that are tried again; each costs an agent a connection
_NONE = Generation(0, (), ())


class Member:
    """Which generation this host is in, and what comes next.

    Call ``found`` or ``join`` once, tell what happens, and call ``tick`` at ``next_tick()`` at the
    latest. After every call, take out ``take_outbox()`` and ``take_events()``. Nothing blocks, but
    that a witness may read and write its file.

    Args:
        card: this agent.
        minimum: ranks that a generation needs.
        maximum: ranks that it has at most; the other seats wait.
        lost_after: seconds of silence after which an agent is lost.
        patience: seconds for which a decision, or enough ranks, are waited for.
        job: messages of other jobs are ignored, unless this one has not begun and that may be why:
            see ``JobTie``. Empty takes the first that answers.
        witness: what decides where two halves of a job cannot reach each other.
        seed: of what is left to chance.

    Attributes:
        generation: the one that this host has seats in; None if there is none.
        finished: the job's ranks have ended their program.
        stopped: why this host cannot go on; empty if it can.
    """

    def __init__(
        self,
        card: HostCard,
        *,
        minimum: int,
        maximum: int,
        lost_after: float,
        patience: float,
        job: str,
        witness: Witness | None = None,
        seed: int = 0,
    ) -> None:
        self.generation: Generation | None = None
        self.finished = False
        self.stopped = ""
        self._card, self._witness = card, witness
        self._limits = Limits(minimum, maximum, lost_after, patience)
        self._chance = random.Random(f"{seed}/{card.id}")  # noqa: S311 -- chance, no secret
        self._here = Here()
        self._peers = Peers(card.id, lost_after)
        self._mail = Mail(self._peers)
        self._tie = JobTie(card.id, job)
        self._lost: list[str] = []  # where agents were that may be started again, the newest first
        self._term: Term | None = None  # of ``generation``
        self._report = Report(card)
        self._told: Report | None = None  # what the others were told last
        self._waits_since: float | None = None  # to begin, or to be taken along
        self._unmet = 0  # generations in a row in which the ranks here did not meet
        self._noted = ""  # what the user was told last
        self._beat_at = 0.0
        self._wake = 0.0
        self._events: list[Event] = []

    @property
    def job(self) -> str:
        """The job's id; empty as long as it is not known."""
        return self._tie.job

    # Founding and joining.

    def found(self, hosts: int, now: float) -> None:
        """Begin a job, once so many agents with seats are there, or some after ``patience``."""
        self._tie.found(hosts)
        self._waits_since = now
        self._review(now)

    def join(self, addresses: Sequence[str], now: float) -> None:
        """Ask to be taken along by the job of any of these agents."""
        self._tie.addresses = tuple(addresses)
        self._waits_since = now
        self._review(now)

    # What happens on this host.

    def seat_started(self, number: int, now: float) -> None:
        """Expect a seat soon: changes in order wait until it is ready or has ended."""
        self._here.start(number)
        self._review(now)

    def seat_ready(self, number: int, now: float) -> None:
        """Take note that a process is up and wants to be a rank."""
        self._here.come(number)
        self._review(now)

    def seat_ended(self, number: int, now: float) -> None:
        """Take note that a process has ended, in whatever way."""
        self._here.end(number)
        self._review(now)

    def seat_joined(self, number: int, generation: int, now: float) -> None:
        """Take note that a rank has met the others."""
        if self._is_now(number, generation):
            self._here.joined.add(number)
            self._unmet = 0
        self._review(now)

    def seat_broken(
        self, number: int, generation: int, suspects: Sequence[int], reason: str, now: float
    ) -> None:
        """Take note that a rank has given up, and which ranks it suspects."""
        if self._is_now(number, generation):
            self._here.broke(number, suspects)
        self._review(now)

    def seat_paused(self, number: int, generation: int, now: float, leaves: bool = False) -> None:
        """Take note that a rank has handed over at a commit at which all did.

        It has done so as one that leaves, or as one that stays. Who wants to leave and stays is
        asked again in the next generation.
        """
        if self._is_now(number, generation):
            self._here.paused[number] = leaves
        self._review(now)

    def seat_leaves(self, number: int, reason: str, now: float) -> None:
        """Take note that a rank wants to leave in order."""
        self._here.leave(number, reason)
        self._review(now)

    def seat_finished(self, number: int, generation: int, now: float) -> None:
        """Take note that a rank has ended its program, with all others.

        That holds whatever the agents have decided meanwhile, since all ranks were at the end.
        """
        if 0 < generation <= self._known.number:
            self._finish()
        self._review(now)

    def leave(self, reason: str, now: float) -> None:
        """Have all seats of this host leave in order."""
        self._here.leave_all(reason)
        self._review(now)

    # The network and the time.

    def receive(self, source: str, message: Message, now: float) -> None:
        """Take in a message of another agent; what cannot be one is ignored."""
        self._peers.catch_up(now)
        try:
            letter = Letter.decode(message)
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
            return
        self._take_in(source, letter, now)
        self._review(now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        self._review(now)

    def next_tick(self) -> float:
        """When ``tick`` must be called at the latest."""
        return min(self._beat_at, self._wake)

    def everyone_knows(self, now: float) -> bool:
        """Whether all others know that the job is finished, or do not answer."""
        return self.finished and self._peers.all_finished(self._others(), now)

    def take_outbox(self) -> list[tuple[str, Message]]:
        """Return what is to be sent, with the address of each; they may get lost."""
        return self._mail.take(self.job, self._report)

    def take_events(self) -> list[Event]:
        """Return what has happened since the last time."""
        events, self._events = self._events, []
        return events

    # What comes in.

    def _take_in(self, source: str, letter: Letter, now: float) -> None:
        report, ballot = letter.report, letter.ballot
        if self.stopped or report.card == self._card or report.card.address != source:
            return
        known = self._known.number
        if not self._tie.takes(letter.job, report, known, self._peers.of_job(now)):
            if self._can_correct(report):
                self._mail.to_address(source)
            return
        is_new = self._peers.note(report, letter.sequence, now)
        if report.is_of_job and not self._known.number:
            self._adopt(report.terms)
        if letter.decided:
            self._learn(letter.decided, now)
        if report.finished:
            self._finish()
        if ballot and ballot["number"] == self._known.number + 1 and self._term:
            if self.finished:  # nothing is decided any more
                self._mail.to(report.card.id)
            else:
                for host, answer in self._term.decree.receive(report.card.id, ballot):
                    self._mail.to(host, answer)
        elif is_new and report.generation < self._known.number:
            self._mail.to(report.card.id)

    def _can_correct(self, report: Report) -> bool:
        """Whether an agent of another job should hear of this one, to go over: it has not begun."""
        founds = report.founder == report.card.id
        own = self.generation is not None if founds else self._report.is_of_job
        return own and not report.generation

    def _adopt(self, terms: Terms) -> None:
        """Keep to what the job does, where this host was told otherwise."""
        if terms != self._limits.terms:
            least, most, seconds = terms
            self._limits = Limits(least, most, seconds, self._limits.patience)
            self._peers.lost_after = seconds
            self._note(
                f"the job has -n {least}:{most} and --lost-after {seconds:g}; so has this host"
            )

    def _note(self, text: str) -> None:
        if text != self._noted:
            self._noted = text
            self._events.append(Note(text))

    def _note_waiting(self, why: str, now: float) -> None:
        """Tell the user why nothing happens, once that lasts."""
        assert self._waits_since is not None
        due = self._waits_since + SILENT_SECONDS
        if now < due:
            self._wake_at(due)
        else:
            self._note(self._limits.waiting(why))

    def _is_now(self, number: int, generation: int) -> bool:
        now = self.generation
        return now is not None and generation == now.number and number in now.ranks(self._card.id)

    def _finish(self) -> None:
        if not self.finished:
            self.finished = True
            self._events.append(Finished())

    def _stop(self, reason: str, *, goes_on: bool = False) -> None:
        if not self.stopped:
            self.stopped = reason
            self.generation = None
            for number in [*self._here.ready, *self._here.starting]:
                self._here.end(number)
            self._events.append(Stop(reason, goes_on))

    # Generations.

    def _learn(self, decided: Generation, now: float) -> None:
        """Install a generation that was decided."""
        if decided.number <= self._known.number or self.finished:
            return
        before, me = self.generation, self._card.id
        there = {card.address for card in decided.hosts}
        known = [card.address for card in self._known.hosts]
        lost = dict.fromkeys([*known, *self._lost, *self._tie.addresses])
        self._lost = [address for address in lost if address not in there][:_MOST_LOST]
        self._unmet = 0 if self._here.joined or not before else self._unmet + 1
        ranks = decided.ranks(me)
        old = before.ranks(me) if before else ()
        dropped = tuple(n for n in old if n not in ranks and n in self._here.ready)
        behind = [number for number in dropped if number not in self._here.leaving]
        apart = {card.id for card in decided.hosts} - self._peers.linked(now)
        self._here.install(dropped)
        self._peers.install(decided, now)
        self._waits_since = self._term = self.generation = None
        if ranks:
            self.generation, self._term = decided, self._new_term(decided)
        elif behind and apart:
            self._stop(
                f"the job goes on without this host as generation {decided.number}: "
                f"{decided.reason}",
                goes_on=True,
            )
            return
        if ranks or before:
            self._events.append(Install(decided, ranks, dropped))

    def _new_term(self, generation: Generation) -> Term:
        name, me = f"{self.job}/{self._tie.founder}", self._card.id
        lost_after = self._limits.lost_after
        decree = Decree(generation, name, me, self._witness, self._chance, lost_after)
        return Term(decree, me, self._limits, self._witness)

    def _view(self, now: float, mute: frozenset[str] = frozenset()) -> View:
        reports = {self._card.id: self._describe(now)}
        reports |= self._peers.reports()
        known = self.generation or _NONE
        return View(self._card.id, known, reports, self._peers.linked(now), mute, self._unmet)

    # What is to be done.

    def _review(self, now: float) -> None:
        """Look at everything again: who is lost, who comes, what can be decided."""
        self._peers.catch_up(now)
        self._wake = now + self._limits.lost_after
        if not self.stopped and not self.finished:
            if self._term:
                self._lead(self._term, now)
            elif self._tie.hosts and not self._known.number:
                self._begin(now)
            else:
                self._wait(now)
        self._speak(now)

    def _begin(self, now: float) -> None:
        """Form the first generation, as its founder."""
        assert self._waits_since is not None
        limits, view = self._limits, self._view(now)
        late = now >= self._waits_since + limits.patience
        first = successor(view, limits.maximum)
        starting = any(view.reports[host].starting for host in view.linked & {*view.reports})
        enough = len(first.seats) >= limits.minimum
        if enough and ((len(first.hosts) >= self._tie.hosts and not starting) or late):
            self._learn(first, now)
        elif late:
            self._stop(
                f"{len(first.seats)} ranks on {len(first.hosts)} hosts came within "
                f"{limits.patience:g} s, and the job needs {limits.minimum}"
            )
        else:
            self._wake_at(self._waits_since + limits.patience)
            if not self._here.starting:
                came = f"{len(first.seats)} of at least {limits.minimum} ranks"
                hosts = f"{len(first.hosts)} of {self._tie.hosts} hosts"
                self._note_waiting(f"{came} and {hosts} have come", now)

    def _wait(self, now: float) -> None:
        """Wait to be taken along."""
        patience, found = self._limits.patience, self._peers.of_job(now)
        if why := self._tie.other_witness(self._witness.id if self._witness else "", found):
            self._stop(why)
            return
        if self._waits_since is None or found:
            self._waits_since = now
        where = ", ".join([card.address for card in self._known.hosts] or self._tie.addresses)
        if found:
            self._note("the job knows of this host, which waits until it is taken along")
        elif now >= self._waits_since + patience:
            self._stop(f"no agent of the job has answered within {patience:g} s at {where}")
        else:
            self._note_waiting(f"no agent of the job has answered at {where}", now)
        self._wake_at(self._waits_since + patience)

    def _lead(self, term: Term, now: float) -> None:
        """See to it that the next generation comes when it must."""
        view, hosts = self._view(now), {*self._others()}
        term.look(view, now)
        if reason := term.take_wish(view):
            self._events.append(Change(reason))
        for host, message in term.vote(view, now, lambda mute: self._view(now, mute)):
            self._mail.to(host, message)
        if term.decided:
            self._learn(Generation.decode(term.decided), now)
            for host in sorted(hosts | {*self._others()}):
                self._mail.to(host)
        elif isinstance(found := term.give_up(view, now), Stop):
            self._stop(found.reason, goes_on=found.goes_on)
        elif found:
            self._note(found)
        self._wake_at(term.wake)

    # What goes out.

    @property
    def _known(self) -> Generation:
        """The newest generation that this agent knows, which it need not be in."""
        return self._peers.generation

    def _wake_at(self, time: float) -> None:
        self._wake = min(self._wake, time)

    def _others(self) -> list[str]:
        """The other agents that should know what this one knows."""
        found = dict.fromkeys(card.id for card in self._known.hosts)
        return [host for host in found if host != self._card.id]

    def _describe(self, now: float) -> Report:
        here = self._here
        return Report(
            self._card,
            self._tie.founder,
            self._known.number,
            self.generation is not None,
            self.finished,
            tuple(sorted(here.starting)),
            tuple(sorted(here.ready)),
            tuple(sorted(here.ended)),
            tuple(sorted(here.leaving.items())),
            tuple(sorted(here.paused)),
            tuple(sorted(number for number, leaves in here.paused.items() if leaves)),
            tuple(sorted(here.broken.items())),
            self._peers.hears(now),
            self._witness.id if self._witness else "",
            self._limits.terms,
        )

    def _speak(self, now: float) -> None:
        """Tell the others what is new here, and that this agent is there."""
        report = self._report = self._describe(now)
        if report == self._told and (self.stopped or now < self._beat_at):
            return
        self._told = report
        self._beat_at = now + self._limits.lost_after / 4
        hosts = {*self._others()} | report.hears
        addresses = {self._peers.address(host) for host in hosts}
        for host in sorted(hosts):
            self._mail.to(host)
        for address in self._lost if self.generation else self._tie.addresses:
            if address not in addresses and address != self._card.address:
                self._mail.to_address(address)
