"""What ``fsdpcore doctor`` says here, as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

if __name__ == "__main__":
    said = subprocess.run(
        [sys.executable, "-m", "fsdpcore", "doctor"], capture_output=True, text=True, check=False
    )
    print(json.dumps({"code": said.returncode, "said": (said.stdout + said.stderr).splitlines()}))
