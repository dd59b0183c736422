"""A whole run: start the teams, let them take turns, print, save."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint_bench import model, report
from checkpoint_bench.cases import (
    COPY,
    DISK,
    LIMIT,
    LOAD,
    MEMCPY,
    PEER,
    PEERS,
    RESHARD,
    SAVE,
    SETTINGS,
    STALL,
    TMPFS,
    Case,
)
from checkpoint_bench.folders import Folders, check_room
from checkpoint_bench.report import Result, StateRow
from fsdpcore.bench.harness import options, record
from fsdpcore.bench.harness.measurements import OURS, wrong_in
from fsdpcore.bench.harness.start import RankProgram
from fsdpcore.bench.harness.team import Team
from fsdpcore.bench.harness.turns import alternate, start_all, versions_of
from fsdpcore.core.errors import ArgumentError

_FOLDER = Path(__file__).parents[1]  # of the modules that a rank needs, which nobody installs
_TRIALS = 3


@dataclass(frozen=True)
class CheckpointRun:
    """What to measure, and where the results go.

    Attributes:
        cases: one after the other.
        transport: scheme or URL of ours.
        against: peers; "dcp" or none.
        setting: of the peer, or "auto" for the one that is the fastest in a few trials.
        rounds: how often the contestants take turns.
        cold: whether to load what is not in the page cache.
        directory, shm: where to make temporary folders, on disk and in memory.
        json: file to write.
    """

    cases: tuple[Case, ...]
    transport: str = "zmq"
    against: tuple[str, ...] = ()
    setting: str = "auto"
    rounds: int = 7
    cold: bool = False
    directory: Path = Path()
    shm: Path = Path("/dev/shm")  # noqa: S108
    json: Path | None = None

    def check(self) -> None:
        """Check everything that can be wrong before a rank is started.

        Raises:
            ArgumentError: an option's value is wrong.
            MissingDependencyError: a package is needed that is not installed.
        """
        if self.rounds < 1:
            raise ArgumentError(f"--rounds must be at least 1, got {self.rounds}")
        options.check_known("--against", self.against, PEERS)
        if self.setting not in ("auto", *SETTINGS):
            raise ArgumentError(
                f"--peer-setting must be auto or one of {', '.join(map(repr, SETTINGS))}, "
                f"got {self.setting!r}"
            )
        for case in self.cases:
            if min(case.ranks, case.readers, case.layers) < 1:
                raise ArgumentError("-n, --readers and --layers must be at least 1")
            if case.readers % case.ranks:
                raise ArgumentError(
                    f"--readers must be a multiple of -n, got {case.readers} and {case.ranks}"
                )
            model.gpt(case.nbytes, case.layers)
            check_room(self.parent(case), _option(case), case.nbytes, 2 + len(self.against))
        options.check_writable(self.json)
        options.check_torch(self.against)

    def parent(self, case: Case) -> Path:
        """Return where a case's temporary folder is made."""
        return self.directory if case.place == DISK else self.shm


def _option(case: Case) -> str:
    return "--dir" if case.place == DISK else "--shm"


def measure(request: CheckpointRun, echo: options.Echo) -> int:
    """Measure all cases.

    Returns:
        How many elements were wrong, over all contestants.

    Raises:
        RankFailedError: a rank failed.
    """
    run = record.RunRecord("checkpoint")
    for line in report.title(request, run.machine):
        echo(line)
    results = []
    versions: dict[str, dict[str, str]] = {}
    for case in request.cases:
        with contextlib.closing(Folders(case.place, request.parent(case))) as folders:
            result = _Measuring(request, case, folders, versions).result()
        for line in report.lines(result, cold=request.cold):
            echo(line)
        results.append(result)
    content = report.content(request, results)
    run.save(request.json, versions=versions, **content)
    return sum(wrong_in(result.rows) for result in results)


class _Measuring:
    """One case, with processes of its own, so that none is seen in another's memory."""

    def __init__(
        self,
        request: CheckpointRun,
        case: Case,
        folders: Folders,
        versions: dict[str, dict[str, str]],
    ) -> None:
        self._request, self._case, self._folders = request, case, folders
        self._versions = versions
        self._setting = request.setting if PEER in request.against else ""
        self._trials: dict[str, float] = {}
        if self._setting == "auto":
            self._setting = SETTINGS[0]

    def result(self) -> Result:
        """Measure it."""
        case = self._case
        if case.reads:
            with self._teams(case.ranks) as teams:
                for name in self._contestants:
                    self._ask(teams, name, SAVE, 0)
        with self._teams(case.players) as teams:
            rows = self._measured(teams)
        nbytes = 4 * sum(
            math.prod(shape) for shape in model.arrays(case.nbytes, case.layers).values()
        )
        filesystem = self._folders.filesystem
        return Result(case, nbytes, rows, filesystem, self._setting, self._trials)

    def _measured(self, teams: Mapping[str, Team]) -> dict[str, StateRow]:
        do = {RESHARD: LOAD}.get(self._case.operation, self._case.operation)
        rows = {name: StateRow(name, 1) for name in self._contestants}
        for name, row in rows.items():  # the first time of each, which also warms it up
            if name == MEMCPY:
                self._ask(teams, MEMCPY, COPY, 0)
                continue
            row.added = [added for (added,) in self._ask(teams, name, do, 0, order="added")]
        if do == SAVE and PEER in teams and self._request.setting == "auto":
            self._try_settings(teams)

        def turn(name: str, number: int) -> list[list[float]]:
            return self._ask(teams, name, COPY if name == MEMCPY else do, number + 1)

        for name, rounds in alternate(rows, self._request.rounds, turn).items():
            rows[name].samples = [[answer[0] for answer in answers] for answers in rounds]
            if do == STALL and name != MEMCPY:
                rows[name].durable = [[answer[1] for answer in answers] for answers in rounds]
        for name in teams:
            rows[name].wrong = self._wrong(teams, name)
        return rows

    def _wrong(self, teams: Mapping[str, Team], name: str) -> int:
        """Change all values, load what is stored, and compare."""
        teams[name].ask(name, "spoil")
        step = 0 if self._case.reads else self._request.rounds
        self._ask(teams, name, LOAD, step)
        return sum(int(wrong) for (wrong,) in teams[name].ask(name, "wrong"))

    def _try_settings(self, teams: Mapping[str, Team]) -> None:
        """Take the peer at its best; its settings take turns."""
        self._trials = dict.fromkeys(SETTINGS, math.inf)
        for _ in range(_TRIALS):
            for setting in SETTINGS:
                self._setting = setting
                took = max(seconds for (seconds,) in self._ask(teams, PEER, SAVE, 0))
                self._trials[setting] = min(self._trials[setting], took)
        self._setting = min(self._trials, key=lambda setting: self._trials[setting])

    def _ask(
        self, teams: Mapping[str, Team], name: str, do: str, step: int, order: str = "turn"
    ) -> list[list[float]]:
        """Order an operation, with the contestant's folder in the state in which it has to be."""
        if do in (SAVE, STALL):
            # Right before it writes again: memory that was in use a moment ago is at hand, while
            # a virtual machine may have to get other memory from its host, at a price.
            self._folders.clear(name)
        if do == LOAD:
            step = 0 if self._case.reads else step
            if self._request.cold and self._case.place != TMPFS:
                self._folders.drop(name)
        threads = SETTINGS.index(self._setting) + 1 if name == PEER else 1
        folder = str(self._folders.of(name))
        team = teams[OURS if name in (LIMIT, MEMCPY) else name]
        return team.ask(name, order, operation=do, folder=folder, step=step, threads=threads)

    @property
    def _contestants(self) -> Sequence[str]:
        beside = MEMCPY if self._case.operation == STALL else LIMIT
        return (OURS, *self._request.against, beside)

    @contextlib.contextmanager
    def _teams(self, ranks: int) -> Iterator[dict[str, Team]]:
        """Start the ranks of all contestants that have some, and make their states."""
        threads = options.threads_per_rank(ranks, 0)
        program = RankProgram.module("checkpoint_bench.member", _FOLDER, threads=threads)
        request = self._request
        wanted = program.starts(ranks, request.transport, [OURS], request.against)
        with contextlib.ExitStack() as stack:
            entrants = start_all(stack, ranks, wanted)
            teams: dict[str, Team] = dict(entrants)
            for name in self._contestants:
                teams.get(name, teams[OURS]).ask(name, "prepare", case=vars(self._case))
            self._versions.update(versions_of(entrants))
            for name in self._contestants[len(teams) :]:
                self._versions[name] = teams[OURS].versions[name]
            yield teams
