"""`python -m edge_pc.backends.probe NAME` loads a backend's library and computes a little with it.

It prints one JSON object of facts. A library built for another CPU is killed for an illegal instruction; in a child
process only that child is killed with it.
"""

from __future__ import annotations

import json
import subprocess
import sys

from edge_pc.backends import entry


def probe_in_child(name: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Probe a backend in a child process. Where that works, the last line of stdout has the facts.

    Raises:
        subprocess.TimeoutExpired: it took longer than `seconds`.
    """
    command = [sys.executable, "-m", "edge_pc.backends.probe", name]
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(entry(sys.argv[1]).probe()) + "\n")
