"""The distribution's Chromium, headless and without a network, for tests of pages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.conftest import absent
from tests.packages import require_programs

if find_spec("selenium") is None:
    absent("chromium", "selenium is not installed: make lint installs it")

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

__all__ = ["Browser", "By", "Keys", "Select", "WebDriverWait", "WebElement", "browsers"]

_PROGRAMS = ("chromium", "chromedriver")
_PACKAGES = ("chromium", "chromium-driver")
_SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,900",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files",
)  # fmt: skip


class Browser:
    """A page in a browser, with its console messages and network requests."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = _find("chromium")
        for switch in (*_SWITCHES, f"--user-data-dir={profile}"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(_find("chromedriver")))

    def open(self, path: Path) -> None:
        """Load a file; what was logged before is forgotten."""
        self.log("browser")
        self.log("performance")
        self.driver.get(path.as_uri())

    def run(self, script: str, *values: Any) -> Any:
        """The value of a script's ``return``; asked over the debugger, which a page's policy does not bind."""
        return self.driver.execute_script(script, *values)

    def tell(self, command: str, **given: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(command, given)

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Return the entries logged since the last call."""
        found: list[dict[str, Any]] = self.driver.get_log(kind)  # type: ignore[no-untyped-call]
        return found

    def complaints(self) -> list[str]:
        """Errors and warnings of the console."""
        return [entry["message"] for entry in self.log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> dict[str, str]:
        """Addresses that the page asked for, those that it holds itself aside, and why the browser refused each."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        asked = {
            one["params"]["requestId"]: one["params"]["request"]["url"]
            for one in events if one["method"] == "Network.requestWillBeSent"
        }  # fmt: skip
        refused = {
            one["params"]["requestId"]: one["params"].get("blockedReason", "")
            for one in events if one["method"] == "Network.loadingFailed"
        }  # fmt: skip
        return {
            address: refused.get(ident, "") for ident, address in asked.items()
            if not address.startswith(("data:", "blob:"))
        }  # fmt: skip


def browsers(profile: Path) -> Iterator[Browser]:
    """One browser, installed where that is allowed; a machine without is as one without SLURM."""
    require_programs("chromium", _PROGRAMS, _PACKAGES)
    found = Browser(profile)
    yield found
    found.driver.quit()


def _find(program: str) -> str:
    return shutil.which(program) or ""
