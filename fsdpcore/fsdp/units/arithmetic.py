"""What the bits of a computation depend on beside its numbers: the processor, and BLAS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from fsdpcore.collectives.consensus import compare
from fsdpcore.comm.backend import Backend
from fsdpcore.core.disagreement import Disagreement
from fsdpcore.core.errors import UnsupportedError

_NUMPY = Path(np.__file__).parent
_THINGS = ("NumPy", "the processor's instructions", "BLAS")


def agree_on_arithmetic(backend: Backend) -> None:
    """Have all ranks compute alike: BLAS with one thread, on like processors; a collective.

    How many threads there are changes the bits of a matrix product, and so do the instructions
    that NumPy and BLAS choose by the processor. The limit is the process's, and stays.

    Raises:
        MismatchError: the ranks have other processors or libraries; says which.
        UnsupportedError: BLAS has several threads, and cannot be limited here.
    """
    libraries = _with_one_thread()
    blas = sorted(
        f"{each['internal_api']} {each['version']} for {each.get('architecture', 'any processor')}"
        for each in libraries
    )
    simd: Any = np.show_config(mode="dicts")
    found = simd["SIMD Extensions"]
    instructions = [*found.get("baseline", []), *found.get("found", [])]
    said = [np.__version__, " ".join(instructions), ", ".join(blas)]
    compare(backend, "virtual_ranks", said, _message)
    # Ranks that are threads of one process may have limited it for each other; by now all have.
    for each in ThreadpoolController().info():
        if each["user_api"] == "blas" and each["num_threads"] != 1:
            raise UnsupportedError(
                f"virtual_ranks needs BLAS with one thread, but {each['internal_api']} keeps "
                f"{each['num_threads']}; start the ranks with blas_threads=1"
            )


def _with_one_thread() -> list[dict[str, Any]]:
    """Limit every BLAS that is loaded to one thread; return what is known of NumPy's.

    Other packages bring their own, which some ranks may have loaded and others not.
    """
    controller = ThreadpoolController()
    for library in controller.lib_controllers:
        # Some are limited by the first thread that has ever done so, and ignore all others.
        take_over = getattr(library, "clear_controlling_thread", None)
        if library.user_api == "blas" and take_over is not None:
            take_over(force=True)
    controller.limit(limits=1, user_api="blas")
    found = [each for each in controller.info() if each["user_api"] == "blas"]
    # It is in NumPy's folder, or in the one beside it that has its name and ".libs". Where neither
    # has one, NumPy takes that of the system.
    return [each for each in found if each["filepath"].startswith(str(_NUMPY))] or found


def _message(found: Disagreement) -> str:
    return (
        f"virtual_ranks promises the same bits on any ranks, but {_THINGS[found.position]} is "
        f"{found.sentence}; take hosts that are alike"
    )
