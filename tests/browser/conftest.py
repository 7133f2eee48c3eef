"""What people decide with: the approval page in a real browser (Debian's Chromium), and the command line.

Both meet the deployed handler behind the local stack's edge.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from local_stack import LocalStack
from tests.browser.site import STAGE, Site

REPOSITORY = Path(__file__).parents[2]
SCREENSHOTS = REPOSITORY / "build" / "screenshots"
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}


# Its event loop must not outlive the module: asyncio.run refuses a second one.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if not (REPOSITORY / "build" / "layer-host" / "python").is_dir():
        pytest.skip("the functions' dependencies are not installed: python -m infra.wheelhouse")
    directory = tmp_path_factory.mktemp("browser")
    cluster = {
        "hyperpod_cluster_arn": "arn:aws:sagemaker:us-west-2:123456789012:cluster/browser00001",
        "hyperpod_cluster_name": "browser",
        "eks_cluster_name": "browser-eks",
        "training_namespaces": ["research"],
    }
    context = directory / "context.json"
    context.write_text(json.dumps({"truestep": {"stage": STAGE, "clusters": [cluster], "deletion_protection": False}}))
    command = [sys.executable, "app.py", "--context", str(context), "--output", str(directory / "cdk.out")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with LocalStack(directory / "state", directory / "cdk.out", cluster=None) as stack:
        yield Site(stack, directory)


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page in a context of its own. Everything that it asks of another host, or fails to load, is an error."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def opened(url: str, **settings: Any) -> Page:
        context = browser.new_context(**{"viewport": DESK, **settings})
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        host = url.split("/")[2]
        page.on("request", lambda sent: sent.url.split("/")[2] == host or problems.append(f"asked for {sent.url}"))
        page.on("console", lambda said: said.type == "error" and problems.append(said.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"a dialog opened: {dialog.message}"))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    # The browser itself reports every answer from 400 on.
    assert [text for text in problems if "the server responded with a status of 4" not in text] == []


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keeps a picture of the page under build/screenshots, for people to look at."""

    def kept(page: Page, name: str, *, full: bool = True) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=full)

    return kept
