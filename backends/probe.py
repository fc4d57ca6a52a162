"""`python -m edge_pc.backends.probe NAME` loads a backend's library and computes a little with it.

`doctor` runs it in a child process: a library built for another CPU is killed for an illegal instruction, and only that
child with it. Prints one JSON object of facts.
"""

from __future__ import annotations

import json
import sys

from edge_pc.backends import entry

if __name__ == "__main__":
    sys.stdout.write(json.dumps(entry(sys.argv[1]).probe()) + "\n")
