"""The page in a real browser: one Chromium and one server for all tests."""

import base64
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from treadle.tracing.trajectories import (
    Filter,
    TrajectoryFiles,
    image_name,
    write_file,
    write_image,
)
from treadle.tracing.trajectories.testing import make_row, make_rows, write_run
from treadle.tracing.viewer.app import make_app
from treadle.tracing.viewer.one_file import make_page
from treadle.tracing.viewer.runs import open_runs

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
_HOSTILE = (
    "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    "\x1b[2J\x1b]0;title\x07 \u202etxt.exe\u202c \u200b\U000e0041 end"
)

_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)
"""One grey pixel."""
expect.set_options(timeout=60_000)  # Five seconds are few on a busy machine.


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(
            "there is no Chromium: build-support/install_browser.sh installs it (apt-get install "
            "chromium)"
        )
    with sync_playwright() as driver:
        # It makes a socket below TMPDIR, whose path may have 107 bytes.
        environment: dict[str, str | float | bool] = {**os.environ, "TMPDIR": "/tmp"}
        opened = driver.chromium.launch(executable_path=found, args=list(_OPTIONS), env=environment)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("runs")
    runs = [write_run(root / "first", steps=3), root / "second", root / "damaged"]
    write_file(root / "second" / "trajectories", step=1, phase="train", rows=[_hostile()])
    name = image_name(_PNG, "image/png")
    write_image(root / "second" / "trajectories", name, _PNG)
    said = [{"role": "user", "content": "What is it?", "images": [name]}]
    seen = make_row(2, "train", 1, 0) | {"task_id": "seen", "messages": json.dumps(said)}
    write_file(root / "second" / "trajectories", step=2, phase="train", rows=[seen])
    for number, run in enumerate(runs[:2]):
        lines = [{"step": s, "reward/mean": s / 20 + number, "b/c": 1.0} for s in range(20)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (run / "config.json").write_text(json.dumps({"run": {"seed": number}}))
        (run / "status.json").write_text('{"state": "finished", "error": null}')
    (root / "damaged" / "trajectories").mkdir(parents=True)
    (root / "damaged" / "trajectories" / "step-000001-train.parquet").write_bytes(b"PAR1")
    (root / "damaged" / "metrics.jsonl").write_text('nonsense\n{"step": 1, "reward/mean": 1}\n')
    yield from _serve(runs)


def _hostile() -> dict[str, Any]:
    """Returns a row in which every text tries to be markup."""
    row = make_row(1, "train", 1, 0) | {
        "task_id": "hostile",
        "prompt": _HOSTILE,
        "response": _HOSTILE,
        "error": _HOSTILE,
        "tools": [_HOSTILE],
        "messages": json.dumps([{"role": role, "content": _HOSTILE} for role in ("user", "tool")]),
        "findings": [{"kind": "drift", "text": _HOSTILE}],
    }
    for span in row["samples"][0]["spans"]:
        span["text"] = _HOSTILE
    return row


def _serve(runs: list[Path]) -> Iterator[str]:
    """Yields the address; requests that come before the server has started wait in the socket."""
    app = make_app(open_runs(runs), token=None)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme="light") as one:
        yield one


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    opened = context.new_page()
    said: list[str] = []
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
    yield opened
    opened.close()
    assert said == []


def _rows(page: Page) -> Any:
    return page.locator("tr[data-row]")


def test_curves_of_all_runs_are_overlaid(page: Page, address: str) -> None:
    page.goto(address)
    chart = page.locator('[data-metric="reward/mean"]')
    # Of each of two runs the line and its smoothed line; the third has one point.
    expect(chart.locator(".trace")).to_have_count(5)
    page.keyboard.press("/")
    page.keyboard.type("b/c")
    page.locator(".metric-names label", has_text="c").click()
    expect(page.locator("[data-metric]")).to_have_count(2)
    page.get_by_label("Smoothing").fill("0")
    expect(chart.locator(".trace")).to_have_count(3)
    page.locator(".legend-item", has_text="second").click()
    expect(chart.locator(".trace")).to_have_count(2)


def test_a_curve_is_read_and_zoomed(page: Page, address: str) -> None:
    page.goto(f"{address}#/curves?smooth=0&m=reward/mean")
    chart = page.locator('[data-metric="reward/mean"]')
    points = chart.locator("circle")
    expect(points).to_have_count(41)
    box = chart.locator(".plot svg svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 1, box["y"] + 50)
    expect(chart.locator(".values")).to_contain_text("first 0 at step 0")
    before = points.nth(19).get_attribute("cx")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    page.mouse.up()
    assert points.nth(19).get_attribute("cx") != before
    page.mouse.dblclick(box["x"] + 9, box["y"] + 9)
    assert points.nth(19).get_attribute("cx") == before


def test_curves_grow_while_the_run_trains(page: Page, tmp_path: Path) -> None:
    run = tmp_path / "live"
    run.mkdir()
    (run / "config.json").write_text("{}")
    serving = _serve([run])
    page.goto(next(serving))
    expect(page.get_by_text("No steps yet")).to_be_visible()
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\n')
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator('[data-metric="reward/mean"] .last')).to_have_text("0.25")
    page.goto("about:blank")
    next(serving, None)


def test_the_table_filters_sorts_and_opens_by_keyboard(page: Page, address: str) -> None:
    page.goto(f"{address}#/trajectories")
    expect(_rows(page)).to_have_count(54)
    page.keyboard.press("/")
    page.keyboard.type("step=2 phase=train error=")
    expect(_rows(page)).not_to_have_count(54)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Reward", exact=True).click()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("Reward")
    page.get_by_label("any tool").select_option("python")
    expect(page.get_by_label("Filter")).to_have_value("step=2 phase=train error= tool=python")
    expect(_rows(page).filter(has_text="calculator")).to_have_count(0)
    page.locator("body").press("j")
    expect(page.locator("tr[aria-selected=true]")).to_have_attribute("data-row", "1")
    page.keyboard.press("Enter")
    first = page.locator(".crumbs b")
    expect(first).to_contain_text("train/")
    opened = first.inner_text()
    page.keyboard.press("j")
    expect(first).not_to_have_text(opened)
    page.keyboard.press("k")
    expect(first).to_have_text(opened)
    page.keyboard.press("u")
    expect(page.locator("tr[aria-selected=true]")).to_have_attribute("data-row", "1")


def test_a_wrong_filter_is_explained(browser: Browser, address: str) -> None:
    # Without the fixture `page`: Chromium reports the refused request on the console.
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{address}#/trajectories")
        expect(_rows(page)).to_have_count(54)
        page.get_by_label("Filter").fill("rewrd<1")
        expect(page.locator("p.error")).to_contain_text("did you mean reward?")
        page.get_by_label("Filter").fill("reward=1")
        expect(page.locator("p.error")).to_be_hidden()


def test_a_trajectory_shows_tokens_group_and_other_steps(page: Page, address: str) -> None:
    page.goto(f"{address}#/trajectory?step=2&phase=train&task=train/1&index=2")
    expect(page.locator(".message.sampled")).to_have_count(2)
    expect(page.locator(".message.tool")).to_contain_text("12")
    expect(page.locator(".group li")).to_have_count(4)
    page.get_by_role("button", name="step 1").click()
    expect(page.locator(".diff h3")).to_have_text("Step 1 → 2")
    page.keyboard.press("t")
    expect(page.locator(".span.sampled")).to_have_count(2)
    page.keyboard.press(".")  # The first sampled token.
    expect(page.locator(".inspector")).to_contain_text("version 1")
    page.get_by_label("Colour by").select_option("mismatch")
    expect(page.locator(".span.sampled .text span").first).to_have_css(
        "background-color", re.compile(r"rgba\(.*, 0\.\d+\)")
    )
    page.get_by_role("tab", name="Trace").click()
    expect(page.locator(".trace-row")).to_have_count(4)
    page.keyboard.press("ArrowRight")
    expect(page.locator(".crumbs b")).to_have_text("train/1 #3")


def test_the_timeline_says_where_time_went(page: Page, address: str) -> None:
    page.goto(f"{address}#/timeline?step=3&phase=train")
    expect(page.locator(".timeline canvas")).to_be_visible()
    expect(page.locator(".card").first).to_contain_text("requests, between")
    page.locator("body").press("k")
    expect(page.get_by_label("Step")).to_have_value("3")  # The validation of step 2.
    expect(page.get_by_label("Timeline of 2 trajectories")).to_be_visible()
    page.locator(".timeline canvas").click(position={"x": 40, "y": 86})
    expect(page.locator(".crumbs b")).to_contain_text("val/")


def test_a_run_is_one_file(context: BrowserContext, address: str, tmp_path: Path) -> None:
    assert address  # The fixture has made the runs.
    run = write_run(tmp_path / "run", steps=3)
    (run / "metrics.jsonl").write_text('{"step": 3, "reward/mean": 0.5}\n')
    (run / "config.json").write_text('{"model": {"path": "a/model"}}')
    write_file(run / "trajectories", step=4, phase="train", rows=[_hostile()])
    file = tmp_path / "report.html"
    rows = (("", "start", "end"), (_HOSTILE, "0.1", "0.9"))
    text = make_page(run, name="one", summary=rows)
    file.write_text(text, errors="replace")
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    for shown in ("a/model", "0.9", "<script>window.ran"):
        expect(page.locator("#view")).to_contain_text(shown)
    expect(page.locator("nav a")).to_have_count(3)
    page.keyboard.press("1")
    expect(page.locator(".last")).to_have_text("0.5")
    page.keyboard.press("2")
    expect(page.locator(".pager")).to_contain_text("of 55 trajectories")
    wanted = 'step=2 phase!=val tool=python error= text~"12" reward>=0 task_id!~x'
    with TrajectoryFiles(run) as files:
        count = files.count(Filter.parse(wanted))
    page.get_by_label("Filter").fill(wanted)
    expect(page.locator(".pager")).to_contain_text(f" of {count} trajectories")
    page.get_by_label("Filter").fill("rewrd<1")
    expect(page.locator("p.error")).to_contain_text("there is no column rewrd")
    page.get_by_label("Filter").fill("step=4")
    expect(page.locator(".pager")).to_contain_text(" of 1 trajectory")
    page.locator("td a").click()
    expect(page.locator(".message.user")).to_contain_text("<script>")
    page.keyboard.press("t")
    expect(page.locator(".span.sampled").first).to_contain_text("<script>")
    assert page.evaluate("window.ran") is None
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]
    page.close()


def test_two_runs_are_compared(page: Page, address: str) -> None:
    page.goto(f"{address}#/compare")
    expect(page.locator(".two .card").first).to_contain_text("run.seed")
    expect(page.locator(".two .card").last).to_contain_text("+1")
    expect(page.locator(".plot .trace").first).to_be_visible()


def test_light_and_dark(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_css("background-color", "rgb(20, 22, 26)")
    page.locator("body").press("d")
    expect(page.locator("html")).to_have_css("background-color", "rgb(246, 247, 249)")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("light or dark")
    page.evaluate("localStorage.clear()")


def test_text_of_a_model_is_inert(page: Page, address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    where = "run=1&step=1&phase=train&task=hostile&index=0"
    for view in (
        "trajectories?run=1",
        *(f"trajectory?{where}&tab={tab}" for tab in ("messages", "tokens", "trace")),
        "timeline?run=1",
    ):
        page.goto("about:blank")
        page.goto(f"{address}#/{view}")
        expect(page.locator("#view")).to_contain_text("hostile" if "traj" in view else "1")
        if "traj" in view:
            text = page.locator("#view").inner_text()
            assert "<script>" in text
            assert "\u241b[2J" in text
            assert "\u27e8U+202E\u27e9" in text
            assert not set(text) & set("\x1b\x07\u202e\u202c\u200b\U000e0041")
        assert page.evaluate("window.ran") is None
        assert page.locator("#view script, #view img").count() == 0
    assert all(url.startswith((address, "about:")) for url in asked)


def test_an_image_is_shown_where_the_model_saw_it(page: Page, address: str) -> None:
    page.goto(f"{address}#/trajectory?run=1&step=2&phase=train&task=seen&index=0&tab=messages")
    image = page.locator(".message.user img")
    expect(image).to_be_visible()
    assert image.evaluate("async image => { await image.decode(); return image.naturalWidth }") == 1


def test_a_damaged_run_opens_with_a_note(page: Page, address: str) -> None:
    page.goto(address)
    notes = page.locator(".problems")
    for said in (
        "damaged: status.json is missing",
        "damaged: config.json is missing",
        "step-000001-train.parquet is left out",
        "metrics.jsonl: 1 damaged lines are left out",
    ):
        expect(notes).to_contain_text(said)
    expect(page.locator('[data-metric="reward/mean"] .last')).to_contain_text("1")
    page.get_by_title("Close").click()
    expect(notes).to_have_count(0)


def test_a_hundred_thousand_trajectories_are_paged(page: Page, tmp_path: Path) -> None:
    run = tmp_path / "large"
    write_file(run / "trajectories", step=1, phase="train", rows=make_rows(1, "train", rows=1000))
    table = pq.read_table(run / "trajectories" / "step-000001-train.parquet")
    for step in range(2, 101):
        steps = pa.array([step] * len(table), pa.int32())
        changed = table.set_column(0, table.schema.field(0), steps)
        name = run / "trajectories" / f"step-{step:06d}-train.parquet"
        pq.write_table(changed, name, compression="none", use_dictionary=False)
    serving = _serve([run])
    page.goto(f"{next(serving)}#/trajectories?sort=-step")
    expect(page.locator(".pager")).to_contain_text("1 \N{EN DASH} 100 of 100,000 trajectories")
    expect(_rows(page)).to_have_count(100)
    page.get_by_title("Last page").click()
    expect(page.locator(".pager")).to_contain_text("99,901 \N{EN DASH} 100,000")
    page.get_by_label("Filter").fill("step=77 task_id=train/500")
    expect(page.locator(".pager")).to_contain_text("1 \N{EN DASH} 1 of 1 trajectory")
    page.goto("about:blank")
    next(serving, None)
