"""Signals and forks, in real processes: libllama's cache and what is noted of it stay together whatever comes when."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from edge_pc.system.files import remove_abandoned

pytestmark = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")

START = """
import gc, os, random, signal, sys, time
from contextlib import closing, suppress
from pathlib import Path
import numpy as np
from llamacpp_tools import *
from edge_pc.backends.llamacpp.entry import LlamaCppOptions

path = Path(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background

def interrupted(work, seconds, times):
    '''Whether signals interrupt the work: the first one after so many seconds, then one after the other.'''
    left = times
    def handler(_, frame):
        nonlocal left
        while frame and frame.f_code is not work.__code__:
            frame = frame.f_back
        if frame and left:
            left -= 1
            raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.0002)
    with suppress(KeyboardInterrupt):
        work()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return left < times

def timed(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
"""

INTERRUPTED_WORK = """
def work():
    with closing(backend.new_context(700)) as context:
        context.encode(plan_of(spans, 300, 330, exact=True), np.arange(30, dtype=np.int32))
        context.prefill(plan_of(spans[:1], 400, 430))
        context.truncate(90)
        context.append(plan_of(spans[1:], 300, 310))
        gone_on(backend, context, 320, 3)
    with closing(backend.new_context(2000)) as context:
        context.prefill(plan_of([], 0, 600))

with opened(path, 256) as backend:
    spans = [whole(encoded(backend, 0, 100))]
    spans.append(whole(encoded(backend, 100, 300, spans)))
    plans = [plan_of([], 0, 40), plan_of(spans, 300, 310, exact=True)]
    wanted = [answered(backend, plan) for plan in plans]
    random.seed(int(sys.argv[2]))
    hits = 0
    with closing(backend.new_context(400)) as bystander:
        first = bystander.prefill(plans[1]).logits
        for times in (1, 1, 1, 1, 1, 3, 3, 10, 30, 100) * 3:
            hits += interrupted(work, random.uniform(0.0001, timed(work)), times)
            assert [equal(answered(backend, plan), logits) for plan, logits in zip(plans, wanted)] == [True, True]
            backend.check()
        assert equal([first, *gone_on(backend, bystander, 310, 2)], wanted[1])
    gc.collect()  # a context that nobody could close may hang on a frame of its interrupt
    assert used(backend) == 0
print("ok" if hits else "never interrupted")
"""

INTERRUPTED_OPENING = """
def work():
    with opened(path) as backend:
        pass

with opened(path) as backend:
    wanted = answered(backend, plan_of([], 0, 40))
random.seed(0)
hits = sum(interrupted(work, random.uniform(0.0001, timed(work)), times) for times in (1, 1, 1, 3, 30) * 4)
with opened(path) as backend:
    assert equal(answered(backend, plan_of([], 0, 40)), wanted)
print("ok" if hits else "never interrupted")
"""

# libllama speaks while it loads, and the signal comes while Python hears it.
INTERRUPTED_LISTENING = """
class Interrupting:
    spoken = 0
    def write(self, text):
        self.spoken += 1
        if self.spoken == 3:
            os.kill(os.getpid(), signal.SIGINT)

stderr, sys.stderr = sys.stderr, Interrupting()
try:
    LlamaCppBackend(path, LlamaCppOptions(verbose=True))
except KeyboardInterrupt:
    print("ok")
finally:
    sys.stderr = stderr
"""

FORKED = """
from edge_pc.errors import EngineError

backend = LlamaCppBackend(path, LlamaCppOptions(threads=2))
wanted = answered(backend, plan_of([], 0, 40))
open_one = backend.new_context(40)
open_one.prefill(plan_of([], 0, 10))

def refused(work):
    try:
        work()
    except EngineError as error:
        return "forked" in error.message
    return False

child = os.fork()
if not child:
    works = [
        lambda: answered(backend, plan_of([], 0, 40)),
        lambda: gone_on(backend, open_one, 10, 1),
        lambda: open_one.truncate(5),
        backend.check,
    ]
    right = all(map(refused, works))
    open_one.close()
    backend.close()
    with opened(path) as own:
        right = right and equal(answered(own, plan_of([], 0, 40)), wanted)
    os._exit(0 if right else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

child = os.fork()
if not child:
    sys.exit(0)  # what was opened in the parent is not closed here
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert equal(answered(backend, plan_of([], 0, 40)), wanted)
assert len(gone_on(backend, open_one, 10, 1)) == 1
backend.check()
print("ok")
"""


def run(program: str, *arguments: object) -> str:
    """What a program prints that ends well."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", START + program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("seed", range(2))
def test_work_interrupted_anywhere(tiny_gguf: Path, seed: int) -> None:
    assert run(INTERRUPTED_WORK, tiny_gguf, seed) == "ok"


def test_opening_interrupted_anywhere(tiny_gguf: Path) -> None:
    assert run(INTERRUPTED_OPENING, tiny_gguf) == "ok"


def test_an_interrupt_while_libllama_speaks_is_not_swallowed(tiny_gguf: Path) -> None:
    assert run(INTERRUPTED_LISTENING, tiny_gguf) == "ok"


@pytest.mark.parametrize("work", ["LlamaCppBackend(path)", "requantize(path, Path(sys.argv[2]), 'q8_0')"])
def test_an_interrupt_ends_a_program_that_does_not_catch_it(tiny_gguf: Path, tmp_path: Path, work: str) -> None:
    program = f"""
from edge_pc.backends.llamacpp.log import NativeLog
from edge_pc.backends.llamacpp.requantize import requantize
NativeLog._receive = lambda *_: os.kill(os.getpid(), signal.SIGINT)
{work}
time.sleep(60)
"""
    command = [sys.executable, "-c", START + program, str(tiny_gguf), str(tmp_path / "out.gguf")]
    done = subprocess.run(command, capture_output=True, timeout=50, cwd=Path(__file__).parent)
    assert done.returncode == -signal.SIGINT
    remove_abandoned(tmp_path / "out.gguf")  # a second interrupt may have hit the cleaning up; the next write does it
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process(tiny_gguf: Path) -> None:
    assert run(FORKED, tiny_gguf) == "ok"
