"""``fsdpcore plan``: what a training step will hold and send, before anything runs."""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import ml_dtypes
import numpy as np
import typer
from numpy.typing import DTypeLike

from fsdpcore.bench.harness.usage import one_line
from fsdpcore.core import text
from fsdpcore.core.errors import ArgumentError, ConfigError
from fsdpcore.core.policy import Costs
from fsdpcore.core.quantities import as_rate, as_size
from fsdpcore.fsdp.plan.choice import (
    Change,
    Training,
    candidates,
    changes,
    cheapest,
    in_words,
)
from fsdpcore.fsdp.plan.make_plan import Sync
from fsdpcore.fsdp.plan.plan import Plan
from fsdpcore.fsdp.sharding.strategy import STRATEGIES, Strategy
from fsdpcore.fsdp.units.precision import Precision
from fsdpcore.launch.config import resolve

NOTHING_FITS = 1
_WAYS = (None, "int8", "int4", "int8,int4,keep")  # of parameters and gradients, with --link
_KEPT_PARTS = 4  # of versions: a rank's own and that of another, of two versions
# Of a link between ordinary machines, beside its rate: per message, byte reduced, and trip.
_ALPHA, _GAMMA, _LATENCY = 2e-5, 1e-10, 1e-4
_DTYPES: dict[str, DTypeLike] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}


def show_plan(
    params: Annotated[float, typer.Option(help="Number of parameters, such as 7e9.")],
    layers: Annotated[int, typer.Option(help="Units that the parameters are spread over.")],
    world: Annotated[int, typer.Option(help="Number of ranks.")],
    strategy: Annotated[str, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")] = "full_shard",
    reshard_after_forward: Annotated[
        str, typer.Option(help="true, false, or how many ranks gather for the backward pass.")
    ] = "true",
    shard_group_size: Annotated[
        int | None, typer.Option(help="Of hybrid_shard: how many ranks share a copy.")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="Of gathered parameters: fp32, bf16 or fp16.")
    ] = "fp32",
    reduce: Annotated[
        str | None, typer.Option(help="Of gradients, if not that of the parameters.")
    ] = None,
    states: Annotated[int, typer.Option(help="Arrays of the optimizer per parameter.")] = 2,
    prefetch: Annotated[int, typer.Option(help="Units that are gathered ahead.")] = 1,
    microbatches: Annotated[int, typer.Option(help="Backward passes before an update.")] = 1,
    sync: Annotated[
        str, typer.Option(help="Reduce gradients in each microbatch, or in the last only.")
    ] = "each",
    memory: Annotated[
        str | None, typer.Option(help="That a rank has, such as 80GB or 24GiB.")
    ] = None,
    transport: Annotated[
        str | None, typer.Option(help="Whose costs tell the time of communication.")
    ] = None,
    compress: Annotated[
        str | None,
        typer.Option(help="How parameters and gradients travel: int8, int4, or int8,int4,keep."),
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Between any two ranks, such as 100Mbit: what pays there.")
    ] = None,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="What the versions of an elastic job take besides.")
    ] = False,
    operations: Annotated[
        bool, typer.Option("--operations", help="List every operation of the step.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan a training step: memory and communication of a rank, for all strategies.

    Names the strategy that sends least of those that fit the memory; where none does, it says what
    comes closest, and what would help; the exit code is then 1. Not counted are what the model
    computes with (activations), and what a transport keeps for its messages.
    """
    with one_line():
        wanted = Strategy(strategy, parse_reshard(reshard_after_forward), shard_group_size)
        training = Training(
            params=params,
            layers=layers,
            world_size=world,
            precision=_precision(precision, reduce),
            optimizer_states=states,
            prefetch=prefetch,
            microbatches=microbatches,
            sync=cast(Sync, sync),  # make_plan refuses what is none
            costs=_costs(transport, link),
        ).compressed(compress)
        limit = None if memory is None else parse_memory(memory)
        answer = _Answer.to(training, wanted, limit, linked=link is not None, elastic=elastic)
    if json:
        typer.echo(json_format.dumps(answer.as_dict(), indent=2))
    else:
        typer.echo("\n\n".join(answer.paragraphs(operations=operations)))
    raise typer.Exit(NOTHING_FITS if answer.fails else 0)


@dataclass(frozen=True)
class _Answer:
    """What the command has to say.

    Attributes:
        plan: of the wanted strategy.
        others: of all strategies.
        versions: bytes that the versions of an elastic job take at most, beside the plan.
        limit: bytes of memory for the plan; None if any will do.
        best: the cheapest that fits.
        closest: the one that needs least memory.
        helps: what would make that fit, where none does.
        ways: the wanted strategy with each way to travel, where a link was given.
    """

    plan: Plan
    others: tuple[Plan, ...]
    versions: int
    limit: int | None
    best: Plan | None
    closest: Plan
    helps: Sequence[Change]
    ways: Mapping[str, Plan]

    @classmethod
    def to(
        cls,
        training: Training,
        wanted: Strategy,
        limit: int | None,
        *,
        linked: bool,
        elastic: bool,
    ) -> _Answer:
        """Work the plans out.

        Raises:
            ArgumentError: they make no sense.
        """
        plan = training.plan(wanted)
        versions = _KEPT_PARTS * plan.version_bytes if elastic else 0
        limit = None if limit is None else max(0, limit - versions)
        others = tuple(training.plan(o) for o in candidates(training.world_size, wanted))
        best = None if limit is None else cheapest(others, limit)
        closest = min(others, key=lambda other: other.peak_bytes)
        helps: list[Change] = []
        if limit is not None and best is None:
            helps = changes(training, closest.strategy, limit)
        ways: dict[str, Plan] = {
            each or "float32": training.compressed(each).plan(wanted)
            for each in (_WAYS if linked else ())
        }
        return cls(plan, others, versions, limit, best, closest, helps, ways)

    @property
    def fails(self) -> bool:
        """Whether there is a limit, and nothing fits it."""
        return self.limit is not None and self.best is None

    def paragraphs(self, *, operations: bool) -> list[str]:
        """Return it as text."""
        parts = [str(self.plan), *([self.plan.table()] if operations else []), self._compared()]
        if self.ways:
            parts.append(self._travel())
        if self.versions:
            parts.append(self._elastic())
        return parts if self.limit is None else [*parts, self._verdict(self.limit)]

    def _travel(self) -> str:
        """Return what each way to travel takes, and which one to take."""
        rows = [
            (name, text.size(plan.bytes_sent), text.duration(plan.seconds))
            for name, plan in self.ways.items()
        ]
        best = min(self.ways, key=lambda name: self.ways[name].seconds or 0.0)
        lines = [text.columns(("travels as", "sent", "communication"), rows)]
        if best == "float32":
            lines.append("nothing is gained by --compress here")
        else:
            lines.append(
                f"least with --compress {best}; fc.OuterStep divides that by the steps between "
                "meetings, where groups of ranks may train apart"
            )
        return "\n".join(lines)

    def _elastic(self) -> str:
        """Return what an elastic job takes besides."""
        place, part = self.plan.placement, text.size(self.plan.version_bytes)
        sent = "of which a replica has the same" if place.replicas > 1 else "sent to another host"
        return (
            f"a version of an elastic job has {part} of each rank, {sent}; versions take up to "
            f"{text.size(self.versions)} of memory"
        )

    def _compared(self) -> str:
        rows = [
            (
                in_words(plan.strategy),
                text.size(plan.persistent.total + plan.quantising),
                text.size(plan.peak_bytes),
                text.size(plan.bytes_sent),
                text.duration(plan.seconds),
                "" if self.limit is None else "yes" if plan.peak_bytes <= self.limit else "no",
            )
            for plan in self.others
        ]
        header = ("strategy", "between steps", "peak", "sent", "communication", "fits")
        return text.columns(header, rows)

    def _verdict(self, limit: int) -> str:
        memory = text.size(limit)
        if self.best is not None:
            return f"cheapest that fits {memory}: {in_words(self.best.strategy)}"
        name, missing = in_words(self.closest.strategy), text.size(self.closest.peak_bytes - limit)
        lines = [f"nothing fits {memory}; {name} comes closest, {missing} more"]
        for change in self.helps:
            fits = "which fits" if change.peak_bytes <= limit else "not enough alone"
            lines.append(f"  with {change.words}: {text.size(change.peak_bytes)}, {fits}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "plan": self.plan.as_dict(),
            "strategies": [
                {
                    "strategy": in_words(other.strategy),
                    "persistent_bytes": other.persistent.total + other.quantising,
                    "peak_bytes": other.peak_bytes,
                    "bytes_sent": other.bytes_sent,
                    "seconds": other.seconds,
                    "fits": None if self.limit is None else other.peak_bytes <= self.limit,
                }
                for other in self.others
            ],
            "travel": {
                name: {"bytes_sent": plan.bytes_sent, "seconds": plan.seconds}
                for name, plan in self.ways.items()
            },
            "versions_bytes": self.versions,
            "memory": self.limit,
            "cheapest": None if self.best is None else in_words(self.best.strategy),
            "changes": [
                {"change": change.words, "peak_bytes": change.peak_bytes} for change in self.helps
            ],
        }


def parse_memory(text: str) -> int:
    """Read a number of bytes: 80GB, 24GiB, 16e9.

    Raises:
        ArgumentError: it is none.
    """
    nbytes = as_size(text, "--memory")
    least = 1_000_000 if text.strip().isdecimal() else 1  # "80" is not 80 bytes
    if not least <= nbytes < 10**18:
        raise ArgumentError(f"--memory must be a size, as in '80GB' or '24GiB', got {text!r}")
    return nbytes


def parse_reshard(text: str) -> bool | int:
    """Read ``--reshard-after-forward``; raises ConfigError."""
    known = {"true": True, "false": False}
    if text.lower() in known:
        return known[text.lower()]
    if not text.isdecimal():
        raise ConfigError(
            f"--reshard-after-forward must be true, false or a number of ranks, got {text!r}"
        )
    return int(text)


def _precision(param: str, reduce: str | None) -> Precision | None:
    found: list[DTypeLike] = []
    for option, name in (("--precision", param), ("--reduce", reduce or param)):
        if name not in _DTYPES:
            raise ConfigError(f"{option} must be one of {', '.join(_DTYPES)}, got {name!r}")
        found.append(_DTYPES[name])
    param_dtype, reduce_dtype = found
    if param_dtype is reduce_dtype is np.float32:
        return None
    return Precision(param_dtype, reduce_dtype)


def _costs(transport: str | None, link: str | None) -> Costs | None:
    if link is not None:
        if transport is not None:
            raise ConfigError("--link and --transport both say what communication costs; pass one")
        rate = as_rate(link, "--link", error=ConfigError)
        return Costs(_ALPHA, 1 / rate, _GAMMA, _LATENCY)
    if transport is None:
        return None
    config = resolve({"transport": transport}, os.environ, Path.cwd())
    costs = config.policy.tuning.costs
    if costs is None:
        raise ConfigError(
            f"what messages over {transport!r} cost is not known; measure it with 'fsdpcore tune'"
        )
    return costs
