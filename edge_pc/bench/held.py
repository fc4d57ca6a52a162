"""`python -m edge_pc.bench.held JSON` keeps prompts open while another process looks at this one's memory.

A line on stdout says that a step is reached; a line on stdin lets it go on. Steps: the engine opened and warm (0
prompts), then each wanted number of prompts. `bench memory` starts it, once or several times.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from edge_pc.bench.setup import BenchOptions, open_engine
from edge_pc.bench.subject import EngineSubject
from edge_pc.bench.texts import Shape, Texts


def hold(request: dict[str, Any]) -> None:
    """Open prompts step by step.

    Args:
        request: `model`, `gguf`, `threads`, `folder`, `backend`, `tokens`, `new`, `steps` (numbers of prompts, rising).
    """
    gguf = Path(request["gguf"]) if request["gguf"] else None
    options = BenchOptions(request["model"], gguf, threads=request["threads"])
    with open_engine(options, request["backend"], Path(request["folder"])) as engine, ExitStack() as held:
        subject = EngineSubject(engine)
        texts = Texts(engine.tokenizer)
        warm_up, case = texts.case(Shape(0, request["new"])), texts.case(Shape(request["tokens"], request["new"]))
        for each in (warm_up, case):
            engine.load_schema(each.schema)
        subject.hold(warm_up).close()
        _reached(0)
        prompts = 0
        for step in request["steps"]:
            while prompts < step:
                held.enter_context(closing(subject.hold(case)))
                prompts += 1
            _reached(step)


def _reached(prompts: int) -> None:
    sys.stdout.write(json.dumps({"prompts": prompts}) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    hold(json.loads(sys.argv[1]))
