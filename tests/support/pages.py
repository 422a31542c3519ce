"""The page in a real browser (Debian's chromium), before a real service."""

import contextlib
import re
import shutil

import live
from playwright.sync_api import expect, sync_playwright

CHROMIUM = shutil.which("chromium")
PATIENCE_MS = live.PATIENCE_S * 1000
expect.set_options(timeout=PATIENCE_MS)

# What the browser itself says of a service that is away, of a refusal and of a missing job: expected where a test brings it about
EXPECTED = re.compile("net::ERR_(CONNECTION|EMPTY|INCOMPLETE|SOCKET)|status of (401|403|404|400|409|503)"
                      "|Cannot convert undefined|Cannot read properties of undefined")
FORWARDED = {"X-Forwarded-For": "192.0.2.7"}


@contextlib.contextmanager
def launch():
    """Chromium."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=PATIENCE_MS)
        yield chromium
        chromium.close()


@contextlib.contextmanager
def visit(browser, box, path="", is_expecting_errors=False, width=1280, height=900, is_waiting=True, **options):
    """A page of its own; at the end, nothing must have been said on its console, thrown, or kept out by the policy."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    context.set_default_timeout(PATIENCE_MS)
    faults = []
    context.add_init_script("""
        window.violations = [];
        addEventListener('securitypolicyviolation', (event) => violations.push(`${event.violatedDirective} ${event.blockedURI}`));
        window.loadedAt = Math.random();
    """)
    page = context.new_page()
    page.on("console", lambda message: message.type in ("error", "warning") and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: (faults.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(f"http://127.0.0.1:{box.port}/{path}")
    if is_waiting:
        expect(page.locator("#connection")).to_have_text("live")
    yield page
    assert page.evaluate("violations") == []
    assert [fault for fault in faults if not (is_expecting_errors and EXPECTED.search(fault))] == []
    context.close()


def row(page, job_id):
    """What the overview tells of a job: at its GPU, or in a list."""
    return page.locator(f"[data-job={job_id}]").first


def axe(page):
    """What axe finds against WCAG 2.1 A and AA."""
    from axe_playwright_python.sync_playwright import Axe
    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}).response["violations"]
    return [(rule["id"], [node["target"] for node in rule["nodes"]][:5], rule["nodes"][0]["failureSummary"]) for rule in found]


def clear_jobs(box):
    """Leave nothing of one test's jobs for the next one in the same box."""
    box.ask("POST", "/service/resume")
    for job in box.ask("GET", "/queue")[::-1]:
        box.call("DELETE", f"/queue/{job['id']}")
    for job in box.ask("GET", "/jobs?status=running"):
        box.call("DELETE", f"/jobs/{job['id']}")
        box.wait(job["id"])
    for status in ("failed", "cancelled", "completed"):
        box.ask("POST", "/jobs/clear", {"status": status})
