"""`python -m edge_pc.bench.held JSON` holds prompts open, so that memory can be counted; `bench memory` starts it.

It reads numbers of prompts on stdin, one a line, opens prompts until it holds as many, and answers each line with one
line of JSON: what memory it has then.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from edge_pc.bench.smaps import memory_of_this_process
from edge_pc.bench.texts import Shape, Texts
from edge_pc.bench.ways import EngineWays
from edge_pc.engine import Engine


def hold(request: dict[str, Any]) -> None:
    """Answer the lines of stdin until it ends.

    Args:
        request: `model` (a path), `backend`, `threads`, `folder` of the states, and `tokens` and `new` of the prompts.
    """
    engine = Engine(
        Path(request["model"]), backend=request["backend"], threads=request["threads"], cache_dir=request["folder"]
    )
    with engine, ExitStack() as held:
        ways, texts = EngineWays(engine), Texts(engine.tokenizer)
        warm_up, case = texts.case(Shape(0, request["new"])), texts.case(Shape(request["tokens"], request["new"]))
        for each in (warm_up, case):
            engine.load_schema(each.schema)
        ways.hold(warm_up).close()
        prompts = 0
        for line in sys.stdin:
            while prompts < int(line):
                held.enter_context(closing(ways.hold(case)))
                prompts += 1
            sys.stdout.write(json.dumps(memory_of_this_process()) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    hold(json.loads(sys.argv[1]))
