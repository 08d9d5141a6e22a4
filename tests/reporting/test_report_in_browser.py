"""The page in a real browser, at the width of a desk and of a phone. Skipped where there is no Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relibra.reporting.pages.report_page import write_report
from tests.reporting.recordings import HOSTILE, sample_row

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Tab:
    """One page of a headless Chromium, driven through its debugging pipe: no driver, no port, no package.

    `events` collects what the browser reported meanwhile.
    """

    def __init__(self, binary: str, profile: Path) -> None:
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4, each message ended by a zero byte.
        keep = f"exec {binary} {' '.join(FLAGS)} --user-data-dir={profile} 3<&{theirs_in} 4>&{theirs_out}"
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", keep],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.buffer, self.serial, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params):
        self.serial += 1
        message = {"id": self.serial, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.serial:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path, *, width: int, height: int = 900, phone: bool = False, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()
        for _ in range(100):
            if self.evaluate(
                "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('.main-svg'))"
            ):
                return
            time.sleep(0.1)
        raise AssertionError(f"{page} drew no figures within ten seconds: {self.complaints()}")

    def evaluate(self, expression: str):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        code = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def complaints(self) -> list[str]:
        """Errors, warnings and refused requests of the page."""
        methods = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in methods]

    def requests(self) -> list[str]:
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        self.session = None
        with contextlib.suppress(OSError, AssertionError, EOFError):
            self.call("Browser.close")
        os.close(self.out)
        os.close(self.into)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _receive(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.into, 1 << 20)
            if not piece:
                raise EOFError("chromium ended")
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        answer = json.loads(message)
        if "method" in answer:
            self.events.append(answer)
        return answer


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    binary = find_chromium()
    if binary is None:
        pytest.skip("no chromium on PATH, so the page was not drawn in a browser: apt-get install chromium")
    tab = Tab(binary, tmp_path / "profile")
    yield tab
    tab.close()


@pytest.mark.slow
def test_page_draws_without_a_complaint_or_a_request(tab: Tab, run_folder: Path) -> None:
    page = write_report(run_folder)
    for width, phone, dark in ((1280, False, False), (390, True, False), (390, True, True)):
        tab.open(page, width=width, phone=phone, dark=dark)
        assert tab.complaints() == []
        assert {url.split(":")[0] for url in tab.requests()} <= {"file", "data"}
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
        tables = "[...document.querySelectorAll('#sizes .scroll')].every((one) => one.scrollWidth <= one.clientWidth)"
        assert tab.evaluate(tables), "figures are hidden beyond the edge"
        assert tab.evaluate("window.alert.toString().includes('native')")
        assert tab.evaluate("document.querySelectorAll('.modebar-btn').length") == 0, "a button sends figures away"
        wide = (
            "[...document.querySelectorAll('.plot .main-svg')].filter((svg) => svg.getBoundingClientRect().right > %d)"
        )
        assert tab.evaluate(f"{wide % width}.length") == 0


@pytest.mark.slow
def test_a_script_that_is_not_ours_does_not_run(tab: Tab, run_folder: Path) -> None:
    page = write_report(run_folder)
    strange = "<script>window.strange = 1</script><img src=data:, onerror='window.strange = 2'>"
    page.write_text(page.read_text().replace("</body>", f"{strange}</body>"))
    tab.open(page, width=1280)
    assert tab.evaluate("window.strange === undefined")
    assert any("Content Security Policy" in str(complaint) for complaint in tab.complaints())


@pytest.mark.slow
def test_step_selector_is_reached_and_moved_by_keys(tab: Tab, run_folder: Path) -> None:
    tab.open(write_report(run_folder), width=1280)
    visible = "document.getElementById('load-plot').data.findIndex((trace) => trace.visible === true)"
    assert tab.evaluate(visible) == 0
    for _ in range(40):
        tab.press("Tab")
        if tab.evaluate("document.activeElement.id") == "load-view":
            break
    assert tab.evaluate("document.activeElement.id") == "load-view"
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    assert tab.evaluate(visible) == 2


@pytest.mark.slow
def test_the_sample_browser_chooses_by_step_and_order(tab: Tab, run_folder: Path) -> None:
    rows = [
        sample_row(step, i, reward=None if i == 4 else i / 20, tokens=100 - i, response=HOSTILE * 50)
        for step in range(3)
        for i in range(20)
    ]
    (run_folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(run_folder)
    tab.open(page, width=390, phone=True)
    shown = (
        "[...document.querySelectorAll('.sample')].filter((one) => !one.hidden)"
        ".map((one) => [Number(one.dataset.step), one.dataset.reward ?? null, Number(one.dataset.tokens)])"
    )
    choose = (
        "for (const [id, value] of %s) { const box = document.getElementById(id); box.value = value; "
        "box.dispatchEvent(new Event('change')); }"
    )
    assert tab.evaluate(shown)[:2] == [[2, "0.95", 81], [2, "0.9", 82]]
    assert tab.evaluate("document.getElementById('sample-count').textContent") == "12 of 20 samples"
    tab.evaluate(choose % [["sample-step", "1"], ["sample-order", "worst"]])
    assert tab.evaluate(shown)[0] == [1, "0.0", 100]
    assert [1, None, 96] not in tab.evaluate(shown), "what has no reward is neither best nor worst"
    tab.evaluate(choose % [["sample-step", ""], ["sample-order", "longest"]])
    assert tab.evaluate(shown)[:4] == [[0, "0.0", 100], [1, "0.0", 100], [2, "0.0", 100], [0, "0.05", 99]]
    tab.evaluate("document.querySelectorAll('.sample').forEach((one) => { one.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390, "the page scrolls sideways"
    assert tab.complaints() == []
    assert tab.evaluate("document.images.length") == 0


@pytest.mark.slow
def test_without_javascript_every_sample_can_be_read(tab: Tab, run_folder: Path) -> None:
    rows = [sample_row(step, sample) for step in range(2) for sample in range(9)]
    (run_folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(run_folder)
    page.write_text(re.sub("script-src [^;]*", "script-src 'none'", page.read_text(), count=1))
    tab.call("Page.navigate", url=page.resolve().as_uri())
    while not any(event["method"] == "Page.loadEventFired" for event in tab.events):
        tab.evaluate("1")
    assert tab.evaluate("[...document.querySelectorAll('.sample')].filter((one) => one.offsetHeight > 0).length") == 18
    assert tab.evaluate("document.querySelector('.choices').offsetHeight") == 0
