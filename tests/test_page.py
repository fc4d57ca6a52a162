"""The page in a real browser: Debian's Chromium, without a window."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_tools import Served, serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
Page, expect = playwright.Page, playwright.expect

# Where pictures of the page go, for people who change it.
PICTURES = os.environ.get("EDGE_PC_TEST_PICTURES")


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tiny_model, tmp_path_factory.mktemp("states")) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: playwright.Browser, served: Served, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page, opened; whatever it logs or asks of other servers is a fault."""
    faults: list[str] = []
    context = browser.new_context(**getattr(request, "param", {"viewport": {"width": 1200, "height": 800}}))
    page = context.new_page()
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda made: faults.append(made.url) if not made.url.startswith(served.url) else None)
    page.goto(served.url)
    expect(page.get_by_text("tiny, on this machine")).to_be_visible()
    yield page
    if PICTURES:
        name = re.sub(r"\W+", "_", request.node.name)
        page.screenshot(path=str(Path(PICTURES) / f"{name}.png"), full_page=True)
    context.close()
    assert faults == []


def ask(page: Page, text: str) -> str:
    """Ask with the keyboard alone; returns the answer."""
    page.get_by_label("Question", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    expect(page.locator("#timing")).to_contain_text("First token after")
    return page.locator(".turn.assistant span").last.inner_text()


def test_a_question_is_answered_and_the_conversation_goes_on(page: Page, served: Served) -> None:
    page.get_by_label("Longest answer, in tokens").fill("12")
    first = ask(page, "Hello")
    expected = served.chat("Hello", max_tokens=12)["choices"][0]["message"]["content"]
    assert first.split() == expected.split()
    ask(page, "And again")
    assert page.locator(".turn").count() == 4
    strip = page.locator("#strip li")
    labels = [strip.nth(index).get_attribute("aria-label") or "" for index in range(strip.count())]
    assert [label.partition(":")[0] for label in labels] == ["earlier text", "new text"]
    assert [label.rpartition(" ")[2] for label in labels] == ["reused", "computed"]
    expect(page.locator("#timing")).to_contain_text("tokens reused")
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0


def test_modules_are_ticked_and_filled(page: Page) -> None:
    page.get_by_label("Longest answer, in tokens").fill("8")
    page.get_by_label("Schema").select_option("trip")
    page.get_by_role("checkbox", name="oslo").check()
    expect(page.get_by_role("checkbox", name="plan")).to_be_checked()
    expect(page.locator("#timing")).to_contain_text("Fill in: time")
    page.get_by_label("time (at most 12 tokens)").fill("a week")
    page.get_by_role("checkbox", name="lisbon").check()
    expect(page.get_by_role("checkbox", name="oslo")).not_to_be_checked()
    expect(page.locator("#timing")).to_contain_text("of them stored")
    ask(page, "What now?")
    ask(page, "And then?")
    strip = page.locator("#strip li")
    kinds = {}
    for index in range(strip.count()):
        label = strip.nth(index).get_attribute("aria-label") or ""
        kinds[label.partition(":")[0]] = strip.nth(index).get_attribute("class")
    modules = {"trip": "cached", "plan": "cached", "lisbon": "cached"}
    assert kinds == {**modules, "earlier text": "cached", "new text": "computed"}
    page.get_by_role("checkbox", name="plan").uncheck()
    expect(page.get_by_role("checkbox", name="lisbon")).not_to_be_checked()


def test_documents_are_dropped_in_and_reused(page: Page, tmp_path: Path) -> None:
    page.get_by_label("Longest answer, in tokens").fill("8")
    (tmp_path / "harbour.md").write_text("The harbour has a tide and an old tram. " * 8, encoding="utf-8")
    (tmp_path / "noise.bin").write_bytes(b"\xff\xfe\x00\x01")
    page.get_by_label("Documents", exact=True).set_input_files([tmp_path / "harbour.md", tmp_path / "noise.bin"])
    expect(page.get_by_role("alert")).to_contain_text("noise.bin is not text in UTF-8")
    expect(page.get_by_label("Documents in the prompt")).to_contain_text("harbour.md")
    page.get_by_label("Keep the conversation").uncheck()
    ask(page, "How old is the tram?")
    ask(page, "Is there a tide?")
    expect(page.locator("#strip li").first).to_have_class("cached")
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["Dropped text."], "dropped.txt", {type: "text/plain"}));
            document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
        }"""
    )
    expect(page.get_by_label("Documents in the prompt")).to_contain_text("dropped.txt")
    page.get_by_role("button", name="Remove harbour.md").click()
    expect(page.get_by_label("Documents in the prompt")).not_to_contain_text("harbour.md")


def test_an_answer_is_stopped_with_the_keyboard(page: Page, served: Served) -> None:
    page.get_by_label("Longest answer, in tokens").fill("900")
    page.get_by_label("Question", exact=True).fill("Go on for long")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant span").last).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    page.wait_for_timeout(50)
    assert served.server.scheduler.load.answering == 0
    expect(page.get_by_label("Question", exact=True)).to_be_focused()


SMALL = {"viewport": {"width": 360, "height": 740}}


@pytest.mark.parametrize(
    "page",
    [{**SMALL, "color_scheme": "light"}, {**SMALL, "color_scheme": "dark"}, {"color_scheme": "dark"}],
    indirect=True,
    ids=["small", "small-dark", "dark"],
)
def test_it_fits_small_screens_and_dark_ones(page: Page) -> None:
    if not page.locator("#settings").evaluate("element => element.open"):
        page.get_by_text("Prompt", exact=True).click()
    page.get_by_label("Schema").select_option("trip")
    page.get_by_role("checkbox", name="notes").check()
    page.get_by_label("Longest answer, in tokens").fill("20")
    ask(page, "What is there to see? " + "x" * 80)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for element in page.locator("button, input, select, textarea").all():
        if element.is_visible():
            frame = element.bounding_box()
            assert frame is not None
            assert frame["x"] >= 0
            assert frame["x"] + frame["width"] <= page.viewport_size["width"]


def test_text_stands_out_and_everything_has_a_name(page: Page) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")]
            .filter((e) => !(e.labels?.length || e.textContent.trim() || e.getAttribute("aria-label")))
            .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    contrast = """(scheme) => {
        const read = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
        const light = (hex) => {
            const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
                .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const pairs = [["--ink", "--paper"], ["--quiet", "--paper"], ["--quiet", "--ground"], ["--wrong", "--paper"],
                       ["--on-accent", "--accent"], ["--ink", "--bubble"]];
        return pairs.map(([one, other]) => {
            const [a, b] = [light(read(one)), light(read(other))];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        });
    }"""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert min(page.evaluate(contrast, scheme)) >= 4.5
