"""The secret of a job, and its id: where launchers and users put them.

The secret keeps strangers out. ``fsdpcore run`` makes one for the ranks that it starts; under other
launchers a user gives it, in a variable or, better, in a file that nobody else can read.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping

from fsdpcore.core.errors import ConfigError

TOKEN, TOKEN_FILE, JOB = "FSDPCORE_TOKEN", "FSDPCORE_TOKEN_FILE", "FSDPCORE_JOB"
_MAX_TOKEN = 4096


def new_token() -> str:
    """A secret that nobody guesses."""
    return secrets.token_hex(32)


def new_job() -> str:
    """An id that no other job has."""
    return secrets.token_hex(8)


def token(environ: Mapping[str, str]) -> str:
    """The secret of the job, from ``FSDPCORE_TOKEN`` or ``FSDPCORE_TOKEN_FILE``; empty for none.

    Raises:
        ConfigError: both are set, or the file holds no secret, or others may read it.
    """
    given, path = environ.get(TOKEN, "").strip(), environ.get(TOKEN_FILE, "")
    if given and path:
        raise ConfigError(f"{TOKEN} and {TOKEN_FILE} are both set; unset one of them")
    return _read(path) if path else given


def _read(path: str) -> str:
    try:
        # Before it is opened, which for a FIFO would wait until somebody writes.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _unusable(path, "is not a regular file")
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_TOKEN + 1)
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror})") from error
    if mode & 0o077:
        raise ConfigError(
            f"{TOKEN_FILE}={path}: other users can read or change the secret (mode {mode:03o}); "
            f"type 'chmod 600 {path}', and make a new one if they may have seen it"
        )
    if len(content) > _MAX_TOKEN:
        raise _unusable(path, f"is longer than {_MAX_TOKEN} bytes")
    text = content.decode(errors="replace").strip()
    if not text:
        raise _unusable(path, "is empty")
    if "\0" in text or "\ufffd" in text:  # a variable of the ranks could not hold it
        raise _unusable(path, "is not text")
    return text


def _unusable(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"{TOKEN_FILE}={path}: it {why}; name a file that holds the job's secret as text: "
        f"'(umask 077; openssl rand -hex 32 > FILE)' makes one"
    )


def job_id(environ: Mapping[str, str]) -> str:
    """The id that a launcher gave the job: equal on all ranks, different between jobs.

    Only variables that surely are the same on all ranks go into it: under ``torchrun`` the count of
    restarts differs between hosts that joined earlier and later, and what MPI's launcher starts
    over ssh knows nothing of the Slurm job around it.
    """
    for kind, names in _IDS:
        if environ.get(names[0]):
            return ":".join([*kind, *filter(None, (environ.get(name) for name in names))])
    return ""


# The innermost launcher counts, as in ``environment``.
_IDS = (
    ((), (JOB,)),
    (("torchrun",), ("TORCHELASTIC_RUN_ID",)),
    (("mpi",), ("PMIX_NAMESPACE",)),
    (("mpi",), ("OMPI_MCA_ess_base_jobid",)),
    (("slurm",), ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
)
