"""The command line on a tiny model: answers, streams, exit codes, the store. Other processes where it matters."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edge_pc.cli import main

Finished = subprocess.CompletedProcess[str]
Run = Callable[..., Finished]

SCHEMA = """<schema name="trip">
  You are a guide.
  <module name="plan">
    We travel for <param name="time" length="40"/>.
    <union>
      <module name="lisbon">In Lisbon, the old tram climbs the hill.</module>
      <module name="oslo">In Oslo, ferries leave for the islands.</module>
    </union>
  </module>
</schema>
"""
PROMPT = '<prompt schema="trip"><plan time="a week"><oslo/></plan> What now?</prompt>'
STATS = {
    "prompt_tokens", "cached_tokens", "computed_tokens", "new_tokens", "parse_ms", "assembly_ms", "forward_ms",
    "ttft_ms", "decode_tokens_per_s", "modules", "picked",
}  # fmt: skip
RESULT = {"text", "token_ids", "stop", "stats", "source", "logprobs"}
COMPARE = {"full_ttft_ms", "in_place_ttft_ms", "ttft_ratio", "max_abs_logit_diff", "kl", "same_first_token"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a schema, a prompt and a text file."""
    (tmp_path / "trip.xml").write_text(SCHEMA, encoding="utf-8")
    (tmp_path / "prompt.xml").write_text(PROMPT, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("The museum opens at ten. Straße, 日本, 🚋.\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def environment(tiny_model: Path) -> dict[str, str]:
    """The variables that every command starts with: the tiny model, short answers."""
    return {"EDGE_PC_MODEL": str(tiny_model), "EDGE_PC_MAX_TOKENS": "8", "EDGE_PC_THREADS": "1"}


@pytest.fixture
def process(folder: Path, environment: dict[str, str]) -> Run:
    """Runs `edge-pc` in its own process, in `folder`."""

    def call(*arguments: str, stdin: str = "", env: Mapping[str, str] | None = None) -> Finished:
        return subprocess.run(
            [sys.executable, "-m", "edge_pc", *arguments],
            cwd=folder,
            env={**os.environ, **environment, **(env or {})},
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
        )

    return call


@pytest.fixture
def run(
    folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs `edge-pc` in this process, in `folder`: the same, and quicker."""

    def call(*arguments: str, stdin: str = "", env: Mapping[str, str] | None = None) -> Finished:
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            for name, value in {**environment, **(env or {})}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
            code = main(arguments)
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(["edge-pc", *arguments], code, captured.out, captured.err)

    return call


def answered(child: Finished) -> dict[str, object]:
    """The object that a successful command printed with --json."""
    assert child.returncode == 0, child.stderr
    value = json.loads(child.stdout)
    assert isinstance(value, dict)
    return value


def test_the_answer_alone_goes_to_stdout(process: Run) -> None:
    plain, chatty = process("run", "prompt.xml"), process("run", "prompt.xml", "--stats", "--compare", "-v")
    assert plain.returncode == chatty.returncode == 0, plain.stderr + chatty.stderr
    assert plain.stdout == chatty.stdout
    assert plain.stdout.endswith("\n")
    assert re.search(r"prompt +\d+ tokens: \d+ cached, \d+ computed", chatty.stderr)
    assert re.search(r"after the process started: import .*, model load ", chatty.stderr)
    assert re.search(r"compared with full prefill: .* first token, largest logit difference .*, KL ", chatty.stderr)
    assert "\x1b" not in chatty.stderr


def test_json_is_one_object_of_the_documented_shape(run: Run) -> None:
    plain = run("run", "prompt.xml", "--fidelity", "fast")
    child = run("run", "prompt.xml", "--json", "--compare", "--stats", "--fidelity", "fast")
    value = answered(child)
    assert child.stdout.count("\n") == 1
    assert set(value) == {*RESULT, "compare"}
    assert set(value["stats"]) >= STATS
    assert set(value["compare"]) >= COMPARE
    assert value["text"].rstrip("\n") == plain.stdout.rstrip("\n")
    modules = value["stats"]["modules"]
    assert [module["path"] for module in modules] == ["trip", "plan", "plan/oslo"]
    assert all(set(module) == {"path", "tokens", "hit", "exact", "reason"} and module["hit"] for module in modules)
    assert set(answered(run("run", "prompt.xml", "--json"))) == RESULT


def test_a_prompt_from_stdin_and_one_from_options_are_the_file_s(run: Run) -> None:
    expected = run("run", "prompt.xml").stdout
    assert run("run", "-", "--schema", "trip.xml", stdin=PROMPT).stdout == expected
    parts = ("run", "--schema", "trip.xml", "--import", "plan/oslo", "--arg", "plan.time=a week")
    assert answered(run(*parts, "--text", " What now?", "--json"))["stats"]["cached_tokens"] > 0
    from_stdin = run(*parts, "--text", "-", stdin=" What now?")
    assert from_stdin.stdout == run(*parts, "--text", " What now?").stdout


def test_variables_set_options_and_the_command_line_wins(run: Run) -> None:
    def new_tokens(*arguments: str, **variables: str) -> int:
        child = run("ask", "Why?", "notes.txt", "--json", *arguments, env=variables)
        return len(answered(child)["token_ids"])

    assert new_tokens(EDGE_PC_MAX_TOKENS="3") == 3
    assert new_tokens("--max-tokens", "2", EDGE_PC_MAX_TOKENS="3") == 2
    text = str(answered(run("ask", "Why?", "notes.txt", "--json"))["text"])
    stop = next(character for character in text[1:] if not character.isspace())
    stops = f"not in it\n{stop}"
    stopped = answered(run("ask", "Why?", "notes.txt", env={"EDGE_PC_STOP": stops, "EDGE_PC_JSON": "1"}))
    assert (stopped["stop"], stopped["text"]) == ("stop", text[: text.index(stop)])


def test_a_second_question_in_a_new_process_computes_only_the_question(process: Run) -> None:
    first = answered(process("ask", "When?", "notes.txt", "--json"))["stats"]
    second = answered(process("ask", "Where?", "notes.txt", "--json", "--strict"))["stats"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] > second["computed_tokens"]
    cold = answered(process("ask", "Where?", "notes.txt", "--json", "--no-cache"))["stats"]
    assert (cold["cached_tokens"], cold["computed_tokens"]) == (0, cold["prompt_tokens"])


def test_strict_makes_a_miss_an_error(run: Run) -> None:
    child = run("ask", "When?", "notes.txt", "--strict")
    assert child.returncode == 2
    assert "notes.txt: not in the store" in child.stderr
    assert "hint: " in child.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "prompt.xml", "--schema", "bad.xml"], 2, r"error: bad\.xml:2:\d+: .*\nhint: "),
        (["schema", "check", "bad.xml"], 2, r"error: bad\.xml:2:\d+: "),
        (["run", "typo.xml"], 2, r"error: typo\.xml:1:\d+: .*did you mean 'plan'"),
        (["ask", "Why?", "missing.txt"], 2, r"error: missing\.txt: the file cannot be read: No such file"),
        (["ask", "Why?", "notes.txt", "--max-tokens", "100000"], 2, r"error: .*1024"),
        (["export", "smollm2"], 2, r"not on this machine yet\nhint: edge-pc pull smollm2"),
        (["ask", "Why?", "notes.txt", "--model", "smolm2"], 2, r"did you mean 'smollm2'"),
        (["ask", "Why?", "notes.txt", "--provider", "cuda"], 3, r"error: .*hint: "),
        (["pull", "gpt-9"], 2, r"there is no model 'gpt-9'"),
        (["export", "notes.txt", "-o", "model"], 2, r"error: notes\.txt"),
        (["export", "prompt.xml"], 2, r"say where to write it: -o DIR"),
    ],
)
def test_failures(run: Run, folder: Path, arguments: list[str], code: int, says: str) -> None:
    (folder / "bad.xml").write_text(
        '<schema name="bad">\n  <module name="a">1 < 2</module>\n</schema>', encoding="utf-8"
    )
    (folder / "typo.xml").write_text('<prompt schema="trip"><plam time="x"/>Go.</prompt>', encoding="utf-8")
    child = run(*arguments)
    assert child.returncode == code, child.stderr
    assert child.stdout == ""
    assert re.search(says, child.stderr, re.DOTALL), child.stderr
    assert "Traceback" not in child.stderr
    assert not (folder / "model").exists()


PUT_TOGETHER = ("run", "--schema", "trip.xml", "--text", "Go.")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--import", "plan"],
            r"module 'plan' needs an argument 'time' .*\nhint: give it as plan\.time .*--arg MODULE\.PARAM=VALUE",
        ),
        (
            ["--import", "oslo"],
            r"module 'oslo' is inside 'plan': import its parent first\nhint: import plan/oslo \(--import MODULE",
        ),
        (["--import", "plam"], r"unknown module 'plam': .*did you mean 'plan'.*\nhint: .*--import MODULE"),
        (["--arg", "plan.time=x"], r"module 'plan' is not imported\nhint: .*--import MODULE"),
        (
            ["--import", "plan/oslo,plan/lisbon", "--arg", "plan.time=x"],
            r"belong to one union.*\nhint: --import MODULE",
        ),
        (["--import", "plan", "--arg", "time"], r"'time' is not MODULE\.PARAM=VALUE"),
        (["--import", "plan", "--arg", "plan.time=a", "--arg", "plan.time=b"], r"--arg: plan\.time is given twice"),
        (["--schema", "trip.xml"], r"one --schema"),
    ],
)
def test_a_prompt_put_together_wrongly_is_refused_in_terms_of_its_options(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str], says: str
) -> None:
    monkeypatch.setattr("edge_pc.cli.run.open_engine", lambda *_: pytest.fail("no model is needed to see this"))
    child = run(*PUT_TOGETHER, *options)
    assert (child.returncode, child.stdout) == (2, "")
    assert re.search(says, child.stderr), child.stderr
    assert "<" not in child.stderr, "nothing is said of a text or of tags"


def test_two_schemas_of_one_name_are_refused(run: Run, folder: Path) -> None:
    (folder / "other.xml").write_text(SCHEMA, encoding="utf-8")
    child = run("run", "prompt.xml", "--schema", "trip.xml", "--schema", "other.xml")
    assert child.returncode == 2
    assert "other.xml is another schema of the name 'trip'" in child.stderr


def test_only_a_default_length_shrinks_to_what_fits(run: Run, folder: Path) -> None:
    (folder / "long.txt").write_text("The old museum opens at ten. " * 32, encoding="utf-8")
    words, unset = ("ask", "When?", "long.txt"), {"EDGE_PC_MAX_TOKENS": ""}
    value = answered(run(*words, "--json", env=unset))
    prompt_tokens, new_tokens = value["stats"]["prompt_tokens"], len(value["token_ids"])
    assert prompt_tokens > 1024 - 256
    assert (value["stop"], new_tokens) in (("eos", new_tokens), ("length", 1024 - prompt_tokens))
    child = run(*words, "--max-tokens", "256", env=unset)
    assert child.returncode == 0
    assert "the files do not fit the model" in child.stderr, "a number that is given is kept"


def test_files_longer_than_the_model_are_asked_about_in_part(run: Run, folder: Path) -> None:
    paragraphs = [f"Number {number}. " + "Nothing is said here. " * 6 for number in range(30)]
    paragraphs[17] += "The museum has an owl."
    (folder / "long.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    child = run("ask", "Owl?", "notes.txt", "long.txt")
    assert child.returncode == 0, child.stderr
    assert child.stderr == (
        "the files do not fit the model; the answer is about 1 of their 31 parts:\n"
        "  long.txt: part 18 of 30\n  nothing of 1 other file\n"
    )
    assert run("ask", "Owl?", "notes.txt", "long.txt", "--quiet").stderr == ""
    stats = answered(run("ask", "Owl? Museum?", "notes.txt", "long.txt", "--json"))["stats"]
    assert stats["picked"] == [
        {"file": "notes.txt", "parts": [1], "of": 1}, {"file": "long.txt", "parts": [18], "of": 30}
    ]  # fmt: skip


def test_documents_of_all_kinds_are_asked_about(run: Run, folder: Path, home: Path) -> None:
    (folder / "docs" / "deep").mkdir(parents=True)
    (folder / "docs" / "page.html").write_text("<html><p>The <b>museum</b> opens.")
    (folder / "docs" / "deep" / "old.txt").write_bytes(b"caf\xe9")
    (folder / "docs" / "picture.png").write_bytes(b"\x89PNG\0")
    child = run("ask", "When?", "docs", "n*.txt", "-", "--json", stdin="From a pipe.")
    paths = [module["path"] for module in answered(child)["stats"]["modules"]]
    assert paths == ["documents", "page.html", "old.txt", "notes.txt", "stdin"]
    assert "old.txt: the file is not UTF-8 (byte 3 is 0xe9); it is read as Windows-1252" in child.stderr
    assert "docs: left out:\n  docs/picture.png: the file is not text, but a picture" in child.stderr
    kept = home / "states" / "texts"
    assert [path.read_bytes().partition(b"\n")[2] for path in kept.iterdir()] == [b"The **museum** opens."]
    again = run("ask", "Where?", "docs", "--json", "--strict", "--fidelity", "fast")
    assert all(module["hit"] for module in answered(again)["stats"]["modules"])
    assert run("cache", "verify").returncode == run("cache", "rm", "--all", "--yes").returncode == 0
    assert not kept.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ask", "-", "-"], "question and file cannot both be read from stdin"),
        (["ask", "Why?", "-", "-"], "stdin (-) can be read only once"),
        (["ask", "Why?", "-"], "stdin: the file is empty"),
        (["ask", "Why?", "https://example.org/x"], "https://example.org/x: this is a URL"),
        (["ask", "Why?", "*.md"], "*.md: no file matches this pattern"),
    ],
)
def test_documents_that_there_are_not(run: Run, arguments: list[str], says: str) -> None:
    child = run(*arguments, stdin="")
    assert child.returncode == 2
    assert says in child.stderr


def test_a_comparison_without_the_cache_stores_nothing(run: Run) -> None:
    value = answered(run("ask", "When?", "notes.txt", "--no-cache", "--compare", "--json"))
    assert value["compare"]["same_first_token"] is True
    assert answered(run("cache", "info", "--json"))["entries"] == 0


def test_a_schema_is_found_beside_its_prompt_or_asked_for(run: Run, folder: Path) -> None:
    (folder / "trip.xml").rename(folder / "other.xml")
    child = run("run", "prompt.xml")
    assert child.returncode == 2
    assert "hint: name the schema's file with --schema FILE" in child.stderr
    assert run("run", "prompt.xml", "--schema", "other.xml").returncode == 0


def test_utf8_on_any_locale(process: Run) -> None:
    schema = '<schema name="größe"><module name="日本">x</module></schema>'
    for locale in ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "latin-1"}):
        child = process("schema", "show", "-", stdin=schema, env=locale)
        assert child.returncode == 0, child.stderr
        assert "größe" in child.stdout
        assert "日本" in child.stdout


def test_interrupted_is_130_and_one_line(folder: Path, environment: dict[str, str]) -> None:
    # Stdin never ends, so the command is surely running when the signal comes.
    child = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", "edge_pc", "run", "-"],
        cwd=folder, env={**os.environ, **environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # Tests that were started in the background hand down that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    _wait_until_reading(child.pid)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, b"", b"interrupted\n")


def _wait_until_reading(pid: int) -> None:
    """Wait until the process sleeps in a read of its stdin."""
    channel = Path(f"/proc/{pid}/syscall")
    if not channel.exists():
        pytest.skip("needs /proc to know when the process waits for its input")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        # The first field is the number of the system call: 0 (x86-64) or 63 (arm64) is read; the next its descriptor.
        if channel.read_text().split()[:2] in (["0", "0x0"], ["63", "0x0"]):
            return
        time.sleep(0.02)
    raise AssertionError("the process never read its stdin")


def test_a_reader_that_goes_away_is_no_error(folder: Path, environment: dict[str, str]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "edge_pc", "run", "prompt.xml"],
        cwd=folder, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == b""
    assert child.wait(60) == 141


def test_encode_for_a_prompt_makes_its_modules_exact(run: Run) -> None:
    (prompt,) = answered(run("encode", "trip.xml", "--for", "prompt.xml", "--json"))["prompts"]
    assert prompt["source"] == "prompt.xml"
    again = run("encode", "trip.xml", "--for", "prompt.xml")
    assert "prompt.xml: 0 exact encodings stored" in again.stderr
    assert run("encode", "trip.xml", "--for", "missing.xml").returncode == 2


def test_encode_says_what_it_writes_and_does_it_once(run: Run, folder: Path) -> None:
    first, second = run("encode", "trip.xml"), run("encode", "trip.xml", "--json")
    assert first.stdout == ""
    assert re.search(r"trip: computing \d+ tokens, writing \d.* to .*states", first.stderr)
    assert re.search(r"trip: 4 encodings stored, 0 were already there; \d+ tokens in ", first.stderr)
    assert "trip: everything is already stored (4 encodings)" in second.stderr
    (report,) = answered(second)["schemas"]
    assert (report["source"], report["schema"], report["encoded"], report["tokens"]) == ("trip.xml", "trip", [], 0)
    assert run("encode", "-", "-q", stdin=SCHEMA).stderr == ""


def test_the_cache_commands(run: Run, home: Path) -> None:
    assert run("cache", "path").stdout == f"{home / 'states'}\n"
    assert "no states are stored" in run("cache", "ls").stderr
    run("encode", "trip.xml", "-q")
    entries = answered(run("cache", "ls", "--json"))["entries"]
    assert sorted(entry["module"] for entry in entries) == ["plan", "plan/lisbon", "plan/oslo", "trip"]
    listing = run("cache", "ls").stdout
    assert all(entry["key"][:12] in listing for entry in entries)
    totals = answered(run("cache", "info", "--json"))
    assert (totals["entries"], totals["nbytes"]) == (4, sum(entry["nbytes"] for entry in entries))
    assert run("cache", "verify").returncode == 0

    assert run("cache", "rm", "trip/plan/oslo", stdin="n\n").returncode == 130
    assert len(answered(run("cache", "rm", "trip/plan/oslo", "--yes", "--json"))["removed"]) == 1
    key = next(entry["key"] for entry in entries if entry["module"] == "trip")
    assert answered(run("cache", "rm", key[:8], "--yes", "--json"))["removed"] == [key]
    nothing = run("cache", "rm", "rome", "--yes")
    assert (nothing.returncode, "no stored states match 'rome'" in nothing.stderr) == (2, True)
    assert len(answered(run("cache", "gc", "--max-size", "1", "--json"))["removed"]) == 2


def test_verify_finds_damage_and_repairs_it(run: Run) -> None:
    run("encode", "trip.xml", "-q")
    path = Path(answered(run("cache", "ls", "--json"))["entries"][0]["path"])
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    found = run("cache", "verify")
    assert found.returncode == 1
    assert path.name in found.stdout
    assert "--repair" in found.stderr
    assert "deleted" in run("cache", "verify", "--repair").stdout
    assert run("cache", "verify").returncode == 0
    assert answered(run("run", "prompt.xml", "--json"))["stop"] in ("eos", "length")


def test_schema_show(run: Run, folder: Path) -> None:
    value = answered(run("schema", "show", "trip.xml", "--json"))
    modules = {module["path"]: module for module in value["modules"]}
    assert modules["plan/oslo"]["start"] == modules["plan/lisbon"]["start"]
    assert [seen["path"] for seen in modules["plan/oslo"]["sees"]] == ["", "plan"]
    assert modules["plan"]["parameters"][0] == {
        "name": "time", "start": modules["plan"]["parameters"][0]["start"], "length": 40, "required": True,
    }  # fmt: skip
    tree = run("schema", "show", "trip.xml").stdout
    assert "union: at most one of 2" in tree
    assert re.search(r"oslo +positions \d+ to \d+, \d+ own tokens; sees \d+ of \(anonymous text\), \d+ of plan", tree)


def test_schema_check_warns_of_tokens_that_differ_in_one_piece(run: Run, folder: Path) -> None:
    (folder / "seam.xml").write_text(
        '<schema name="seam">a th<module name="m">e cat</module></schema>', encoding="utf-8"
    )
    child = run("schema", "check", "trip.xml", "seam.xml")
    assert child.returncode == 0
    assert "trip.xml: fine; 3 modules" in child.stderr
    assert re.search(r"warning: seam\.xml:1:\d+: 'e cat' may follow 'a th'", child.stderr)
    assert child.stderr.count("warning") == 1


def test_doctor(run: Run) -> None:
    child = run("doctor", "--json")
    value = answered(child)
    checks = {check["name"]: check for check in value["checks"]}
    assert value["ok"] is True
    assert checks["backend onnx"]["status"] == "ok"
    assert "CPU" in checks["backend onnx"]["detail"]
    assert all(f"{name} " in checks["libraries"]["detail"] for name in ("numpy", "onnxruntime", "click", "xxhash"))
    assert "matplotlib" not in checks["libraries"]["detail"], "an extra is not needed"
    assert checks["models"]["hint"] == "edge-pc pull smollm2 && edge-pc export smollm2"
    assert all(check["name"] in run("doctor").stdout for check in value["checks"][:1])


def test_doctor_survives_a_library_that_kills_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "onnxruntime.py"
    broken.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["doctor"]) == 3
    assert "killed by SIGILL: built for another CPU" in capsys.readouterr().out
    broken.write_text("raise ImportError('libfoo.so: cannot open shared object file')\n", encoding="utf-8")
    assert main(["doctor"]) == 3
    assert "libfoo.so: cannot open shared object file" in capsys.readouterr().out


def test_refining_makes_the_next_answer_about_the_same_files_exact(process: Run, folder: Path) -> None:
    (folder / "more.txt").write_text("The tower is in the old town.\n", encoding="utf-8")
    files = ["notes.txt", "more.txt"]
    first = process("ask", "Where?", *files, "--stats", "--refine")
    assert first.returncode == 0
    second = process("ask", "Where?", *files, "--stats", "--strict")
    assert second.stderr.count("approximate") == 0
    third = process("ask", "Where?", *reversed(files), "--stats", "--fidelity", "fast")
    assert re.search(r"notes\.txt +\d+ +hit, approximate", third.stderr), "in another order it is another selection"
    fourth = process("ask", "Where?", *reversed(files), "--stats", "--fidelity", "fast")
    assert re.search(r"notes\.txt +\d+ +hit, approximate", fourth.stderr)
