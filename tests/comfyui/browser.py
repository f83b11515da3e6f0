"""ComfyUI's page in a real browser: Debian's chromium, driven by Playwright, which downloads nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graph_server import PACK_NAMES, GraphServer
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
_READY = "window.app?.graph && window.app.extensionManager && window.comfyAPI?.api?.api"
_QUIET = {"Comfy.TutorialCompleted": True, "Comfy.Window.UnloadConfirmation": False}
MINUTE = 60_000  # milliseconds, as Playwright counts


def chromium() -> str | None:
    """The browser's path, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def running_browser(executable: str) -> Iterator[Browser]:
    """A headless browser. While it runs, this thread has an event loop: asyncio.run does not work."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class ComfyPage:
    """A fresh profile's page of ComfyUI, and everything that went wrong in it."""

    def __init__(self, browser: Browser, server: GraphServer, with_pack: bool = True, **settings: Any):
        self.server, self.complaints, self.requests = server, set[str](), list[str]()
        server.fetch("/settings", _QUIET | settings)
        self._context = browser.new_context(viewport={"width": 1700, "height": 1000})
        self._context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
        self.page: Page = self._context.new_page()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self._complain(f"page error: {error}"))
        self.page.on("response", lambda answer: answer.status >= 400 and self._complain(f"{answer.status} {answer.url}"))
        self.page.on("request", lambda request: self.requests.append(request.url.removeprefix(server.url)))
        self.page.on("requestfailed", lambda failed: self._failed(failed.url, failed.failure or ""))
        if not with_pack:  # an empty script, since a missing one is an error of its own
            for name in PACK_NAMES:
                self.page.route(f"**/extensions/{name}/**", _empty_script)
        self.page.goto(server.url)
        self.page.wait_for_function(_READY, timeout=2 * MINUTE)
        self.page.wait_for_load_state("networkidle")

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._complain(f"{message.text.splitlines()[0]} [{message.location.get('url', '')}]")

    def _failed(self, url: str, why: str) -> None:
        if "ERR_ABORTED" not in why:  # the page gave up by itself, when it was left
            self._complain(f"{why}: {url}")

    def _complain(self, text: str) -> None:
        """Without what differs from run to run: the port, queries, and whom ComfyUI's registry is asked about."""
        if "/favicon.ico" in text:  # asked for by the browser, once, in whichever page
            return
        text = re.sub(r"(https://api\.comfy\.org)/[^\s'\]]*", r"\1", text.replace(self.server.url, ""))
        self.complaints.add(re.sub(r"\?[^\s'\]]*", "", text))

    def close(self) -> None:
        self._context.close()

    def reload(self) -> None:
        """As the user's key F5."""
        self.page.reload()
        self.page.wait_for_function(_READY, timeout=2 * MINUTE)
        self.page.wait_for_load_state("networkidle")

    def load(self, graph: dict[str, Any]) -> None:
        """Open a graph in the API format, with nodes beside each other and seeds that stay."""
        self.page.evaluate(
            """graph => {
                app.loadApiJson(graph, "test");
                app.graph.nodes.forEach((node, index) => { node.pos = [index * 480, 100]; node.size[0] = 420; });
                for (const widget of app.graph.nodes.flatMap(node => node.widgets ?? []))
                    if (widget.name === "control_after_generate") widget.value = "fixed";
            }""",
            graph,
        )
        self.page.wait_for_timeout(300)

    def show(self, kind: str) -> None:
        """Move the canvas so that a node of this type fills it."""
        self.page.evaluate(
            """kind => {
                const node = app.graph.nodes.find(node => node.comfyClass === kind);
                app.canvas.ds.scale = 1;
                app.canvas.ds.offset = [400 - node.pos[0], 120 - node.pos[1]];
                app.canvas.setDirty(true, true);
            }""",
            kind,
        )
        self.page.wait_for_timeout(300)

    def run(self) -> None:
        """Press Run; :meth:`ended` waits."""
        self.page.evaluate(
            """() => {
                window.mixgrpoEnded = null;
                for (const how of ["execution_success", "execution_error", "execution_interrupted"])
                    window.comfyAPI.api.api.addEventListener(
                        how, event => { window.mixgrpoEnded = [how, event.detail.exception_message ?? ""]; }, { once: true });
            }"""
        )
        self.page.get_by_role("button", name="Run", exact=True).click()

    def ended(self, minutes: float = 4) -> str:
        """How the run ended: execution_success, _error with its sentence, or _interrupted."""
        self.page.wait_for_function("window.mixgrpoEnded", timeout=minutes * MINUTE)
        self.page.wait_for_timeout(300)
        return " ".join(self.page.evaluate("window.mixgrpoEnded")).strip()

    def until(self, condition: str, argument: Any = None, minutes: float = 2) -> None:
        """Wait for a JavaScript function's true."""
        self.page.wait_for_function(condition, arg=argument, timeout=minutes * MINUTE)

    def properties(self, kind: str) -> dict[str, Any]:
        """The properties that a node of this type has, as a saved workflow holds them."""
        text = self.page.evaluate("kind => JSON.stringify(app.graph.nodes.find(n => n.comfyClass === kind).properties)", kind)
        return json.loads(text)


def _empty_script(route: Route) -> None:
    route.fulfill(content_type="application/javascript", body="")


Opener = Callable[..., ComfyPage]
