"""What CuPy and NCCL do on this machine that our transport builds on: asked before it is used.

    python -m gpu_bench.probes FILE [SECONDS]

writes a JSON object, anew after each answer. Every question is asked in processes of its own, with
a limit of time: an answer may be a crash, or that nothing ever came back.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fsdpcore.bench.harness import record
from gpu_bench import limited
from gpu_bench.facts import facts
from gpu_bench.probe_two import WAYS

_LIMIT = 45.0
_TAIL = 1500


def main(file: Path, seconds: float) -> None:
    """Ask everything that fits the time."""
    end = time.monotonic() + seconds
    found: dict[str, Any] = {"machine": facts()}

    def ask(name: str, *arguments: str) -> Any:
        left = end - time.monotonic()
        if left < 1:
            answer: Any = {"left_out": "for want of time"}
        else:
            answer = _answer(["-m", f"gpu_bench.{arguments[0]}", *arguments[1:]], min(_LIMIT, left))
        found[name] = answer
        record.save(file, found)
        return answer

    ask("doctor", "doctor")
    for kind in ("nccl", "arrays", "costs", "pinned"):
        ask(kind, "probe_one", kind)
    works = ""
    for way in WAYS:
        answer = ask(f"two ranks on one GPU, {way}", "probe_two", way, "talk")
        works = works or (way if "error" not in json.dumps(answer) else "")
    found["two ranks on one GPU"] = works or "refused in every way"
    for question in ("abort", "death") if works else ():
        ask(f"{question}, {works}", "probe_two", works, question)
    record.save(file, found)


def _answer(arguments: list[str], seconds: float) -> Any:
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        environ = {"NCCL_DEBUG": "WARN", **os.environ}
        code = limited.python(arguments, seconds, output, environ=environ)
        output.seek(0)
        text = output.read()
    if code is None:
        return {"error": f"not done after {seconds:.0f} s", "output": text[-_TAIL:]}
    took = {"took_s": round(time.monotonic() - start, 1)}
    answers = [line for line in text.splitlines() if line.startswith("{")]
    if code or not answers:
        return {"error": f"ended with code {code}", "output": text[-_TAIL:], **took}
    other = "\n".join(line for line in text.splitlines() if line not in answers)
    return {**json.loads(answers[-1]), **({"output": other[-_TAIL:]} if other else {}), **took}


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 120.0)
