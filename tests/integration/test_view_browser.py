"""Open every page of `trivet view` in a real browser: its content, hostile text, and the speed for a large run.

scripts/install_browser.py installs the browser. Without it these tests are skipped.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from support import browser as browser_module
from support.big_run import orchestrator_line, rollout_record, trainer_line, write_run, write_status
from support.browser import Browser, Page
from trivet.config.layout import RunLayout

pytestmark = pytest.mark.skipif(
    not browser_module.is_installed(), reason="no headless browser: run .venv/bin/python scripts/install_browser.py"
)

STEPS = 60
HOSTILE = "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'>\u202e&lt;b&gt;"


@contextmanager
def viewing(*directories: Path) -> Iterator[str]:
    """Yield the address of a `trivet view` of these runs, which must end well."""
    command = [sys.executable, "-m", "trivet.cli.main", "view", *map(str, directories)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        yield next(word for word in words if word.startswith("http"))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    layout = write_run(tmp_path_factory.mktemp("runs") / "first", num_steps=STEPS, is_running=True)
    hostile = rollout_record(
        STEPS,
        0,
        env=HOSTILE,
        scores={HOSTILE: 1.0},
        prompt=[{"role": HOSTILE, "content": HOSTILE}],
        completion=[
            {"role": "assistant", "content": HOSTILE, "tool_calls": [{"function": {"name": HOSTILE, "arguments": HOSTILE}}]},
            {"role": "tool", "content": [{"type": "text", "text": HOSTILE}, {"type": HOSTILE}], "tool_call_id": HOSTILE},
        ],
    )
    path = layout.rollouts_step(STEPS) / "rollouts.jsonl"
    path.write_text(json.dumps(hostile) + "\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    return layout


@pytest.fixture(scope="module")
def address(layout: RunLayout) -> Iterator[str]:
    with viewing(layout.root) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def show(browser: Browser, address: str, fragment: str = "", **options: object) -> Page:
    page = browser.open(address + fragment, **options)  # type: ignore[arg-type]  # width, height, scheme
    page.wait_for("document.body?.dataset.ready")
    return page


@pytest.mark.core
def test_the_first_page_has_the_curves_and_says_who_waits(browser: Browser, address: str):
    page = show(browser, address)
    titles = page.evaluate("[...document.querySelectorAll('.chart')].map((chart) => chart.dataset.metric)")
    assert titles[:7] == [
        "orchestrator:reward/mean",
        "trainer:loss/mean",
        "trainer:entropy/mean",
        "trainer:mismatch_kl/mean",
        "orchestrator:batch/off_policy_level/mean",
        "trainer:perf/throughput",
        "trainer:time/step",
    ]
    assert f"for batch {STEPS + 1} (from orchestrator)" in page.evaluate("document.querySelector('.status').innerText")
    # Each chart has pixels of its run's colour on the canvas.
    drawn = page.evaluate("""[...document.querySelectorAll('.chart canvas')].map((canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.some((red, at) => at % 4 === 0 && red === 0x2f && data[at + 1] === 0x6f && data[at + 2] === 0xde);
    })""")
    assert all(drawn)
    assert page.complaints() == []


def test_the_page_asks_nobody_but_its_server(browser: Browser, address: str):
    page = show(browser, address)
    assert {urlsplit(url).netloc for url in page.requested()} == {urlsplit(address).netloc}


def test_steps_that_end_meanwhile_appear_by_themselves(browser: Browser, address: str, layout: RunLayout):
    page = show(browser, address)
    random = np.random.default_rng(5)
    with (layout.metrics / "trainer.jsonl").open("ab") as trainer, (layout.metrics / "orchestrator.jsonl").open("ab") as other:
        trainer.write(trainer_line(STEPS + 1, random, num_steps=STEPS))
        other.write(orchestrator_line(STEPS + 1, random, num_steps=STEPS))
    page.wait_for(f"document.querySelector('.chart canvas').getAttribute('aria-label').includes('at step {STEPS + 1}.')")


def test_keys_lead_through_the_pages(browser: Browser, address: str):
    page = show(browser, address)
    for key, ready in (("2", "timeline"), ("3", "rollouts"), ("4", "evals"), ("5", "config"), ("1", "curves")):
        page.press(key)
        page.wait_for(f"document.body.dataset.ready === '{ready}'")
    page.press("?")
    assert page.evaluate("document.getElementById('help').open")
    page.press("Escape")
    assert page.complaints() == []


def test_a_drag_shows_the_steps_within_and_a_click_opens_a_step(browser: Browser, address: str):
    page = show(browser, address)
    box = "document.querySelector('.chart canvas').getBoundingClientRect()"
    x, y, width, height = (page.evaluate(f"{box}.{side}") for side in ("x", "y", "width", "height"))
    middle = y + height / 2
    for kind, at in (("mouseMoved", 0.4), ("mousePressed", 0.4), ("mouseMoved", 0.7), ("mouseReleased", 0.7)):
        page.mouse(kind, x + at * width, middle)
    label = "document.querySelector('.chart canvas').getAttribute('aria-label')"
    page.wait_for(f"!{label}.includes('at step 1 to')")
    page.press("Escape")  # the chart has the focus
    page.wait_for(f"{label}.includes('at step 1 to')")
    page.press("Home")
    page.press("ArrowRight")
    page.press("Enter")
    page.wait_for("document.body.dataset.ready === 'rollouts' && location.hash.includes('step=2')")
    assert page.complaints() == []


def test_the_time_line_tells_waiting_from_work(browser: Browser, address: str):
    page = show(browser, address, "#/timeline?steps=4&last=20")
    spans = page.evaluate("[...document.querySelectorAll('rect.span title')].map((title) => title.textContent)")
    assert "trainer, step 18: waits for a batch (from orchestrator), 3 s" in spans
    assert "orchestrator, step 18: waits for rollouts (from inference), 9 s" in spans
    assert "inference, step 18: generates rollouts, 9 s" in spans
    assert "inference, step 18: loads a policy: 18, 800 ms" in spans
    assert "25 % waits for a batch from orchestrator" in page.evaluate("document.querySelector('.shares').innerText")
    assert page.complaints() == []


def test_a_rollout_is_shown_in_full_with_its_tokens_in_colour(browser: Browser, address: str):
    page = show(browser, address, f"#/rollouts?step={STEPS - 1}&line=1")
    text = page.evaluate("document.querySelector('.detail').innerText")
    for words in (
        "calls python",
        '{"code": "print(17 * 23)"}',
        "391",
        "advantage",
        "correct",
        f"policy {STEPS - 2}: 38 tokens",
    ):
        assert words in text
    colours = "[...document.querySelectorAll('.sampled')].map((token) => token.style.background)"
    assert page.evaluate("document.querySelectorAll('.sampled').length") == 48
    assert len(set(page.evaluate(colours))) > 10
    page.evaluate("[...document.querySelectorAll('input[name=colour]')][1].click()")
    assert len(set(page.evaluate(colours))) == 2  # of two policies
    page.press("j")
    page.wait_for("document.querySelector('.detail').innerText.includes('rollout 2')")
    assert page.complaints() == []


def test_text_of_a_model_is_text(browser: Browser, address: str):
    page = show(browser, address, f"#/rollouts?step={STEPS}&line=0")
    page.wait_for("document.querySelector('.detail')?.innerText.includes('window.hit = 1')")
    assert page.evaluate("document.querySelectorAll('main script, main img, main b b').length") == 0
    assert page.evaluate("window.hit === undefined")
    assert "&lt;b&gt;" in page.evaluate("document.querySelector('.detail pre').textContent")
    assert page.complaints() == []


def test_two_runs_stand_side_by_side_and_what_differs_is_marked(
    browser: Browser, layout: RunLayout, tmp_path_factory: pytest.TempPathFactory
):
    other = write_run(tmp_path_factory.mktemp("runs") / "second", num_steps=20, seed=1, shift=-0.2)
    with viewing(layout.root, other.root) as address:
        page = show(browser, address)
        label = page.evaluate("document.querySelector('.chart canvas').getAttribute('aria-label')")
        assert "first: from" in label
        assert "second: from" in label
        page.press("5")
        page.wait_for("document.body.dataset.ready === 'config'")
        different = page.evaluate("[...document.querySelectorAll('tr.different th')].map((cell) => cell.textContent)")
        assert different == ["max_steps", "seed"]
        assert page.complaints() == []


@pytest.mark.parametrize("fragment", ["", "#/timeline", "#/rollouts", "#/evals", "#/config"])
def test_a_run_that_has_just_begun_says_what_is_awaited(browser: Browser, tmp_path: Path, fragment: str):
    layout = RunLayout(tmp_path)
    layout.metrics.mkdir()
    write_status(layout, num_steps=0, is_running=True)
    with viewing(tmp_path) as address:
        page = show(browser, address, fragment)
        assert len(page.evaluate("document.querySelector('.empty').innerText")) > 40
        assert page.complaints() == []


def test_dark_is_taken_from_the_system_and_can_be_switched(browser: Browser, address: str):
    page = show(browser, address, scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(20, 23, 27)"
    page.press("t")
    assert page.evaluate(ground) == "rgb(251, 251, 250)"
    page.evaluate("localStorage.clear()")


@pytest.mark.parametrize("width", [1024, 420])
def test_nothing_overflows_a_small_laptop_or_a_phone(browser: Browser, address: str, width: int):
    for fragment in ("", "#/timeline", "#/rollouts", "#/config"):
        page = show(browser, address, fragment, width=width, height=700)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, fragment
