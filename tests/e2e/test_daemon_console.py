"""The web console in a real browser, over a real daemon with a scripted model."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

CHROMIUM = shutil.which("chromium")
PAGES = ("overview", "models", "requests", "scheduler", "playground", "downloads", "keys", "incidents", "settings")
SHOTS = os.environ.get("INFERD_TEST_SHOTS")  # a folder where the pictures are kept
SLOW = {"delay_s": 0.02, "replies": {}}
XSS = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


class Visit:
    """One browser window that notes whatever goes wrong in it."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.troubles: list[str] = []
        page.on("console", lambda line: self.troubles.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))

    async def open(self, name: str) -> None:
        await self.page.goto(f"{self.address}/console/{name}")

    async def log_in(self, key: str) -> None:
        await self.page.goto(f"{self.address}/console")
        await self.page.fill("#key", key)
        await self.page.click("button")
        await expect(self.page).to_have_title("Overview · inferd")


async def visit(browser: Browser, daemon: Any, **window: Any) -> Visit:
    context = await browser.new_context(**window)
    await context.grant_permissions(["clipboard-read", "clipboard-write"])
    visitor = Visit(await context.new_page(), daemon.address)
    await visitor.log_in(daemon.state.keys.create(f"w{id(context)}", ("admin",))[0])
    return visitor


def ask(daemon: Any, content: str = "x", **fields: Any) -> asyncio.Task[Any]:
    body = {"model": daemon.model, "messages": [{"role": "user", "content": content}], **fields}
    return asyncio.create_task(daemon.http.post("/v1/chat/completions", json=body))


async def test_every_page_loads_without_a_complaint(start_daemon: Any, browser: Browser, tmp_path: Path) -> None:
    daemon = await start_daemon(scripted=SLOW)
    asking = ask(daemon, max_tokens=500, ignore_eos=True)
    shots = Path(SHOTS or tmp_path)
    for theme in ("light", "dark"):
        for width, height in ((1280, 800), (390, 844)):
            visitor = await visit(browser, daemon, viewport={"width": width, "height": height}, color_scheme=theme)
            for name in PAGES:
                await visitor.open(name)
                await visitor.page.wait_for_timeout(150)
                await visitor.page.screenshot(path=shots / f"{name}-{width}-{theme}.png")
                is_wider = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
                assert not await visitor.page.evaluate(is_wider), f"{name} scrolls sideways at {width}"
            assert visitor.troubles == []
    asking.cancel()


async def test_a_request_appears_moves_and_is_cancelled_by_click(start_daemon: Any, browser: Browser) -> None:
    daemon = await start_daemon(scripted=SLOW)
    visitor = await visit(browser, daemon)
    page = visitor.page
    await visitor.open("requests")
    await expect(page.locator("#live")).to_contain_text("No requests yet")
    asking = ask(daemon, max_tokens=2000, ignore_eos=True)
    row = page.locator("tr[data-request]")
    await expect(row).to_have_attribute("data-state", "decode")
    before = await row.locator("td[data-label=Output]").inner_text()
    await expect(row.locator("td[data-label=Output]")).not_to_have_text(before)
    await row.locator("a[data-drawer]").click()
    await expect(page.locator("#drawer")).to_contain_text("KV blocks")
    await page.keyboard.press("Escape")
    await expect(page.locator("#drawer")).to_be_hidden()
    await row.get_by_role("button", name="Pause").click()
    await expect(row).to_have_attribute("data-state", "paused")
    assert await row.get_attribute("data-reason") == "paused_by"
    await row.get_by_role("button", name="Resume").click()
    await expect(row).to_have_attribute("data-state", "decode")
    await row.get_by_role("button", name="Cancel").click()
    await page.locator("#ask button[value=yes]").click()
    await expect(row).to_have_attribute("data-state", "cancelled")
    assert (await asking).json()["error"]["code"] == "request_cancelled"
    assert visitor.troubles == []


async def test_a_model_is_unloaded_loaded_and_pinned_by_click(start_daemon: Any, browser: Browser) -> None:
    daemon = await start_daemon()
    visitor = await visit(browser, daemon)
    page = visitor.page
    await visitor.open("models")
    row = page.locator("tr[data-model]")
    await row.get_by_role("button", name="Sleep").click()
    await expect(row).to_have_attribute("data-state", "sleeping_1")
    await row.get_by_role("button", name="Wake").click()
    await expect(row).to_have_attribute("data-state", "ready")
    await row.get_by_role("button", name="Unload").click()
    await page.locator("#ask button[value=yes]").click()
    await expect(row).to_have_attribute("data-state", "on_disk")
    await row.get_by_role("button", name="Load").click()
    await expect(row).to_have_attribute("data-state", "ready")
    await row.get_by_role("button", name="Pin").click()
    await expect(row.get_by_role("button", name="Unpin")).to_be_visible()
    actions = [entry.action for entry in daemon.state.audit.latest()]
    assert actions.count("model.sleep") == 1
    assert "model.options" in actions


async def test_the_playground_streams_an_answer(start_daemon: Any, browser: Browser) -> None:
    daemon = await start_daemon(scripted={"replies": {"": XSS}})
    visitor = await visit(browser, daemon)
    page = visitor.page
    await visitor.open("playground")
    await page.fill("textarea", XSS)
    await page.keyboard.press("Enter")
    await expect(page.locator(".turn.assistant .text")).to_have_text(XSS)
    await expect(page.locator(".turn.assistant .head")).to_contain_text("tokens")
    assert await page.evaluate("window.hacked") is None
    assert visitor.troubles == []


async def test_text_of_others_never_runs(start_daemon: Any, browser: Browser) -> None:
    daemon = await start_daemon(scripted=SLOW)
    visitor = await visit(browser, daemon)
    body = {
        "model": daemon.model,
        "messages": [{"role": "user", "content": XSS}],
        "max_tokens": 300,
        "ignore_eos": True,
    }
    headers = {"user-agent": XSS, "x-session-id": XSS}
    asking = asyncio.create_task(daemon.http.post("/v1/chat/completions", json=body, headers=headers))
    for name in ("requests", "overview", "incidents"):
        await visitor.open(name)
        await visitor.page.wait_for_timeout(300)
    await visitor.open("requests")
    await visitor.page.locator("a[data-drawer]").first.click()
    await expect(visitor.page.locator("#drawer")).to_contain_text("<img src=x")
    assert await visitor.page.evaluate("window.hacked") is None
    assert visitor.troubles == []
    asking.cancel()


async def test_a_key_is_made_shown_once_and_revoked(start_daemon: Any, browser: Browser) -> None:
    daemon = await start_daemon()
    visitor = await visit(browser, daemon)
    page = visitor.page
    await visitor.open("keys")
    await page.fill("#newkey input[name=name]", "laptop")
    await page.click("#newkey button")
    await expect(page.locator("#madekey")).to_contain_text("ifd_")
    key = (await page.locator("#madekey").inner_text()).split(" ")[0]
    assert daemon.state.keys.find(key) is not None
    await visitor.open("keys")
    assert key not in await page.content()
    await page.locator("tr", has_text="laptop").get_by_role("button", name="Revoke").click()
    await page.locator("#ask button[value=yes]").click()
    await expect(page.locator("tr", has_text="laptop")).to_contain_text("revoked")
    assert daemon.state.keys.find(key) is None


async def test_nothing_is_seen_or_done_without_a_session(start_daemon: Any, browser: Browser) -> None:
    daemon = await start_daemon()
    page = await (await browser.new_context()).new_page()
    await page.goto(f"{daemon.address}/console/requests")
    await expect(page).to_have_title("Log in · inferd")
    await page.fill("#key", daemon.state.keys.create("i", ("infer",))[0])
    await page.click("button")
    await expect(page.get_by_role("alert")).to_be_visible()
    visitor = await visit(browser, daemon)
    cookies = await visitor.page.context.cookies()
    (cookie,) = cookies
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    forged = {"cookie": f"{cookie['name']}={cookie['value']}", "authorization": ""}
    refused = await daemon.http.post(f"/admin/v1/unload/{daemon.model}", headers=forged)
    assert refused.status_code == 403
    assert daemon.state.supervisor.slot(daemon.model).engine is not None
