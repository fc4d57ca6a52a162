"""How an answer and what it cost are shown, the same for `ask` and `run`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from edge_pc.cli.clock import process_age_ms
from edge_pc.cli.output import counted
from edge_pc.runtime.serving import COMPUTED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_pc.cli.opening import StartUp
    from edge_pc.cli.options import ServingOptions
    from edge_pc.cli.output import Output
    from edge_pc.compose.laid_out import Cited, PickedParts
    from edge_pc.engine import Engine
    from edge_pc.progress import OnProgress
    from edge_pc.runtime.compare import Comparison
    from edge_pc.runtime.stats import ModuleStats, Result, Stats
    from edge_pc.runtime.stream import Stream


def answer(
    start: Callable[[OnProgress], Stream],
    compare: Callable[[], Comparison],
    engine: Engine,
    serving: ServingOptions,
    start_up: StartUp,
    output: Output,
    *,
    as_json: bool,
    source: Callable[[Result], Cited | None] | None = None,
) -> None:
    """Write the answer and show what the options ask for.

    Args:
        start: makes the stream; its prompt is submitted when its first piece is requested.
        compare: compares the same prompt with a full prefill.
        engine: both use it.
        source: finds out where an answer is from; None: that is not asked for.
    """
    submitted_ms = process_age_ms()
    result = _show_stream(start, output, as_json=as_json)
    if source is not None:
        result = replace(result, source=source(result))
        output.note(f"source: {result.source or 'none of the files has words of the answer'}")
    if serving.stats:
        show_stats(result.stats, start_up, submitted_ms, output)
    comparison = None
    if serving.compare:
        output.note("computing the whole prompt, to compare")
        comparison = compare()
    if as_json:
        output.json(result_as_json(result, comparison))
    elif comparison is not None:
        show_comparison(comparison, output)
    if serving.refine:
        with output.progress("refining") as update:
            engine.refine(uses=1, progress=update)


def _show_stream(start: Callable[[OnProgress], Stream], output: Output, *, as_json: bool) -> Result:
    """Write the answer as it comes (not with --json); until the first piece, show what is being computed."""
    with output.progress("computing") as update:
        stream = start(update)
        pieces = iter(stream)
        piece = next(pieces, "")
    with closing(stream):
        _show_picked(stream.result.stats.picked, output)
        if not as_json:
            output.answer(piece)
        for piece in pieces:
            if not as_json:
                output.answer(piece)
        result = stream.result
    if not as_json and not result.text.endswith("\n"):
        output.answer("\n")
    return result


def _show_picked(picked: Sequence[PickedParts], output: Output) -> None:
    """Say what of the files the answer is about, where not all of them fit."""
    if not picked:
        return
    count, total = sum(len(file.parts) for file in picked), sum(file.of for file in picked)
    output.note(f"the files do not fit the model; the answer is about {count} of their {total} parts:")
    used = [file for file in picked if file.parts]
    for file in used:
        of = f" of {file.of}" if file.of > 1 else ""
        output.note(f"  {file.file}: {'part' if len(file.parts) == 1 else 'parts'} {_ranges(file.parts)}{of}")
    if len(used) < len(picked):
        output.note(f"  nothing of {counted(len(picked) - len(used), 'other file')}")


def _ranges(numbers: Sequence[int]) -> str:
    """`1, 3-5` for 1, 3, 4, 5."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(s) if s == e else f"{s}-{e}" for s, e in zip(starts, ends, strict=True))


def result_as_json(result: Result, comparison: Comparison | None) -> dict[str, Any]:
    """The object that --json prints."""
    value = asdict(result)
    return value if comparison is None else {**value, "compare": asdict(comparison)}


def show_stats(stats: Stats, start_up: StartUp, submitted_ms: float, output: Output) -> None:
    """What was reused, what was computed, how long each step took, and the whole wait since the process started.

    Args:
        submitted_ms: age of the process when the prompt was submitted.
    """
    steps = {
        "parse": stats.parse_ms,
        "encode": stats.encode_ms,
        "assembly": stats.assembly_ms,
        "choose": stats.choose_ms,
        "forward": stats.forward_ms,
    }
    after_submission = ", ".join(
        f"{name} {_ms(ms)}" for name, ms in steps.items() if ms or name not in ("encode", "choose")
    )
    before = f"import {_ms(start_up.import_ms)}, model load {_ms(start_up.load_ms)}"
    rows = [
        ("prompt", f"{stats.prompt_tokens} tokens: {stats.cached_tokens} cached, {stats.computed_tokens} computed"),
        ("first token", f"{_ms(stats.ttft_ms)} after submission: {after_submission}"),
        ("", f"{_ms(submitted_ms + stats.ttft_ms)} after the process started: {before}, then the above"),
        ("answer", f"{stats.new_tokens} tokens, {stats.decode_tokens_per_s:.1f} tokens/s"),
    ]
    output.note("")
    for name, text in rows:
        output.note(f"{name:<12} {text}")
    if stats.modules:
        states = [(module.path, module.tokens, _served(module)) for module in stats.modules]
        output.table(["module", ">tokens", "states"], states, to_stderr=True)


def _served(module: ModuleStats) -> str:
    """How a module was served; approximate are states that were made without the modules before it."""
    if module.reason == COMPUTED:
        return module.reason
    if not module.hit:
        return f"miss: {module.reason}"
    return "hit" if module.exact else "hit, approximate"


def show_comparison(comparison: Comparison, output: Output) -> None:
    """Reuse against a full prefill, and against the limit: continuing the same tokens in place."""
    full = comparison.full_ttft_ms
    waits = {
        "full prefill": full,
        "stored states": comparison.cached_ttft_ms,
        "in place (the limit)": comparison.in_place_ttft_ms,
    }
    output.note("")
    output.table(
        ["first token by", ">after ms", ">times faster"],
        [(name, f"{wait:.1f}", f"{full / wait:.1f}") for name, wait in waits.items()],
        to_stderr=True,
    )
    same = "the same" if comparison.same_first_token else "another"
    output.note(
        f"compared with full prefill: {same} first token, largest logit difference "
        f"{comparison.max_abs_logit_diff:.2g}, KL {comparison.kl:.2g}; close from --fidelity {comparison.needed} on"
    )


def _ms(value: float) -> str:
    """Milliseconds, with seconds from 10 s on."""
    return f"{value / 1e3:.1f} s" if value >= 1e4 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
