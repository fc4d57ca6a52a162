"""Runs the two questions of README.md's transcript and writes what they print into it (`make transcript`).

The numbers are those of the machine it runs on, so run it on one that does nothing else.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from edge_pc.system.machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN = "<!-- transcript: made by `make transcript` -->"
END = "<!-- end of transcript -->"
FILE = "docs/demo/hostel.md"
QUESTIONS = ("How many beds does the hostel have?", "How high is the tower?")


def ask(question: str, states: str) -> str:
    """What a terminal shows: the command, the answer, the stats."""
    arguments = ["ask", question, FILE, "--stats"]
    child = subprocess.run(
        [sys.executable, "-m", "edge_pc", *arguments, "--cache-dir", states],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=True,
    )
    lines = [line.rstrip() for line in child.stdout.splitlines()]
    return "\n".join([f"$ edge-pc {shlex.join(arguments)}", *lines]) + "\n"


def transcript() -> str:
    """Both questions, with no stored states at first."""
    machine, load = describe_machine(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as states:
        shown = "\n".join(ask(question, states) for question in QUESTIONS)
    place = f"{machine.allowed_cores} cores of {machine.cpu}"
    if load > machine.allowed_cores / 2:
        place += f", busy with other work (load {load:.1f}),"
    return (
        f"```\n{shown}```\n\nMeasured on {place} with SmolLM2-135M-Instruct in 8 bit; each command is a new process.\n"
    )


def main() -> None:
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{transcript()}{END}{after}", encoding="utf-8")
    sys.stdout.write(f"wrote the transcript in {README.name}\n")


if __name__ == "__main__":
    main()
