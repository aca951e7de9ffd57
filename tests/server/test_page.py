"""The page in a real browser: a chat, stop, regenerate, safe markdown, the engine's view."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]
FLAGS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
).split()
SCRIPT = Path(__file__).with_name("fake_server.py")
MARKDOWN = """# Title

Some **bold**, *slanted*, `code`, ~~gone~~ and [a link](https://example.org),
[not](javascript:alert(1)).

1. one
2. two
   - nested

| a | b |
|---|---|
| 1 | <img src=x onerror=alert(1)> |

```python
x = "<script>alert(1)</script>"
```

> quoted

<script>alert(1)</script>
"""


@pytest.fixture(scope="module")
def url():
    words = (sys.executable, str(SCRIPT), "0", "0.01")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(words, **pipes) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[1]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, url):
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    opened, problems = context.new_page(), []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    outside = []
    opened.on("request", lambda r: None if r.url.startswith(url) else outside.append(r.url))
    opened.goto(url)
    opened.wait_for_selector("#state-dot.ready")
    yield opened
    context.close()
    assert not problems and not outside


def ask(page, text="hello", most="40"):
    page.click("#tab-sampling")
    page.fill("#max_tokens", most)
    page.fill("#message", text)
    page.press("#message", "Enter")


def finished(page):
    page.wait_for_selector("#send:not([hidden])", timeout=60_000)


def expect(page, selector, pattern):
    found = playwright.expect(page.locator(selector))
    found.to_have_text(re.compile(pattern, re.DOTALL), timeout=30_000)


def test_a_chat_is_answered_and_announced(page):
    assert page.title().startswith("fake")
    ask(page, "hello <b>there</b>")
    finished(page)
    assert page.inner_text(".message.user .body") == "hello <b>there</b>"
    answer = page.inner_text(".message.assistant .body")
    assert answer
    assert "40 tokens" in page.inner_text(".meta")
    assert page.text_content("#announce").split()[:3] == answer.split()[:3]
    assert page.evaluate("document.activeElement.id") == "message"
    assert page.is_hidden("#welcome")


def test_stop_then_regenerate(page):
    ask(page, most="3000")
    expect(page, ".assistant .body", ".{6}")
    page.press("#message", "Escape")
    finished(page)
    assert "stopped" in page.inner_text(".meta")
    page.fill("#max_tokens", "5")
    page.click(".regenerate")
    expect(page, ".meta", "5 tokens")
    finished(page)
    assert page.locator(".message").count() == 2
    page.click("#new-chat")
    assert page.locator(".message").count() == 0 and page.is_visible("#welcome")


def test_markdown_makes_nodes_and_no_html(page):
    html = page.evaluate(
        """async (text) => {
          const { render } = await import("/markdown.js");
          const box = document.createElement("div");
          box.append(...render(text));
          return box.innerHTML;
        }""",
        MARKDOWN,
    )
    for part in ("<h3>Title</h3>", "<strong>bold</strong>", "<em>slanted</em>", "<code>code</code>",
                 "<del>gone</del>", "<ol><li>one</li><li>two<ul><li>nested</li></ul></li></ol>",
                 "<td>1</td>", "<blockquote><p>quoted</p></blockquote>"):  # fmt: skip
        assert part in html
    assert 'href="https://example.org/"' in html or 'href="https://example.org"' in html
    assert 'rel="noopener noreferrer nofollow"' in html
    assert not re.search(r"<(script|img)|javascript:[^<]*\"", html)


@pytest.mark.parametrize(
    "text",
    ["**" * 3000, "`" * 3000, "> " * 500, "- " * 500, "[" * 3000, "|\n|-" * 300, "_a " * 2000],
)
def test_markdown_ends_for_any_text(page, text):
    took = page.evaluate(
        """async (text) => {
          const { render } = await import("/markdown.js");
          const began = performance.now();
          render(text);
          return performance.now() - began;
        }""",
        text,
    )
    assert took < 3000


def test_the_engine_is_shown_while_it_works(page):
    ask(page, most="1000")
    page.click("#tab-engine")
    expect(page, "#running", "^1 of 16")
    page.wait_for_selector("#batch .name")
    assert "1199" in page.get_attribute("canvas.map", "aria-label")
    expect(page, "#rate", r"^[1-9]")
    box = page.locator("canvas.map").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    assert page.inner_text("#map-note").startswith("Block")
    page.click("#stop")
    expect(page, "#running", "^0 of 16")


def test_it_is_used_by_keyboard_and_named_for_screen_readers(page):
    page.focus(".skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "message"
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, canvas")].filter((node) =>
          !(node.labels?.length || node.textContent.trim() || node.getAttribute("aria-label")))
          .map((node) => node.outerHTML)"""
    )
    assert unnamed == []
    page.focus("#tab-engine")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-sampling", "aria-selected") == "true"
    assert page.is_visible("#temperature") and page.is_hidden("#map-title")


def test_light_and_dark_and_narrow(page):
    assert page.get_attribute("html", "data-theme") == "light"
    page.click("#theme")
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.set_viewport_size({"width": 390, "height": 780})
    page.wait_for_selector("#side", state="hidden")
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
    page.click("#toggle-side")
    assert page.is_visible("#side")


def test_the_models_own_sampling_is_where_the_controls_begin(page):
    page.wait_for_function("document.querySelector('#top_k').value === '30'")
    page.click("#tab-sampling")
    page.fill("#top_k", "5")
    page.reload()
    page.wait_for_selector("#state-dot.ready")
    assert page.input_value("#top_k") == "5"  # what was chosen is remembered
    page.click("#tab-sampling")
    page.click("#reset")
    page.wait_for_function("document.querySelector('#top_k').value === '30'")
