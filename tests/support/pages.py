"""The page in a real browser (Debian's chromium, without windows of its own), before a real service.

    def test_it(browser, box):
        with pages.visit(browser, box, "#/jobs/abc") as page:       # fails at an error on its console
            expect(page.get_by_role("heading", name="Job abc")).to_be_visible()
"""

import contextlib
import json
import re
import shutil
import subprocess

import live
from live import clear_jobs  # noqa: F401
from playwright.sync_api import expect, sync_playwright

CHROMIUM = shutil.which("chromium-headless-shell")
PATIENCE_MS = live.PATIENCE_S * 1000
expect.set_options(timeout=PATIENCE_MS)

# What the browser itself says of a service that is away, of a refusal and of a missing job: expected where a test brings it about
EXPECTED = re.compile("net::ERR_(CONNECTION|EMPTY|INCOMPLETE|SOCKET)|status of (401|403|404|400|409|503)"
                      "|Cannot convert undefined|Cannot read properties of undefined")
FORWARDED = {"X-Forwarded-For": "192.0.2.7"}
TABS = {}                               # {browser: those that no visit has now}


@contextlib.contextmanager
def launch():
    """Chromium, and the tabs that visits in it have left open."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=PATIENCE_MS)
        TABS[chromium] = []
        yield chromium
        del TABS[chromium]
        chromium.close()


def park(browser):
    """Let its tabs ask nobody any more."""
    for tab in TABS[browser]:
        tab.page.goto("about:blank")


class Tab:
    """A page in a context of its own, and what went wrong in it."""

    def __init__(self, browser, script="", **options):
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(PATIENCE_MS)
        self.context.add_init_script("""
            window.violations = [];
            addEventListener('securitypolicyviolation', (event) => violations.push(`${event.violatedDirective} ${event.blockedURI}`));
            window.loadedAt = Math.random();
        """ + script)
        self.page, self.faults = self.context.new_page(), []
        self.page.on("console", self.note)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.faults.append(f"a dialog: {dialog.message}"), dialog.dismiss()))

    def note(self, message):
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.text} {message.location.get('url', '')}".rstrip())

    def open(self, address, width, height, color_scheme, reduced_motion, headers):
        """Load a page anew; by far the cheapest way is to load what is there once more."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        self.context.set_extra_http_headers(headers)
        if self.page.url.partition("#")[0] == address.partition("#")[0]:
            self.page.evaluate("(address) => { sessionStorage.clear(); scrollTo(0, 0); history.replaceState(null, '', address); }", address)
            self.page.once("framenavigated", self.begin)
            self.page.reload()
        else:
            self.page.once("framenavigated", self.begin)
            self.page.goto(address)

    def begin(self, frame):
        """What was said before is of the former visit, whose service, or whose job, has gone meanwhile."""
        self.faults.clear()

    def forget(self):
        """Nothing stays of a visit but the page itself."""
        for page in self.context.pages:
            if page != self.page:
                page.close()
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.evaluate("() => { sessionStorage.clear(); localStorage.clear(); }")
        assert self.context.cookies() == []


@contextlib.contextmanager
def visit(browser, box, path="", is_expecting_errors=False, width=1280, height=900, is_waiting=True, color_scheme="light",
          reduced_motion="no-preference", extra_http_headers=None, **options):
    """A page that knows of no other visit; at the end, nothing must have been said on its console, thrown, or kept out by the policy.

    A context, and a process, for each would take three times as long.  A visit with `options` has a context of its own.
    """
    free = TABS[browser]
    tab = free.pop() if free and not options else Tab(browser, **options)
    tab.open(f"http://127.0.0.1:{box.port}/{path}", width, height, color_scheme, reduced_motion, extra_http_headers or {})
    if is_waiting:
        expect(tab.page.locator("#connection")).to_have_text("live")
    yield tab.page
    faults = tab.page.evaluate("violations") + [fault for fault in tab.faults if not (is_expecting_errors and EXPECTED.search(fault))]
    assert faults == [], faults
    tab.forget()
    if options:
        tab.context.close()
    else:
        free.append(tab)


def row(page, job_id):
    """What the overview tells of a job: at its GPU, or in a list."""
    return page.locator(f"[data-job={job_id}]").first


def axe(page):
    """What axe finds against WCAG 2.1 A and AA; what it finds to be well is not listed, which would take most of the time."""
    from axe_playwright_python.sync_playwright import Axe
    options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"]}
    found = Axe().run(page, options=options).response["violations"]
    return [(rule["id"], [node["target"] for node in rule["nodes"]][:5], rule["nodes"][0]["failureSummary"]) for rule in found]


def curl(box, command, **more):
    """Submit a job as the README says; its id."""
    done = subprocess.run(["curl", "-sS", "-H", "Content-Type: application/json", "-d", json.dumps({"command": command, **more}),
                           f"http://127.0.0.1:{box.port}/queue"], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)["id"]


def cancel(page, job_id):
    """On its page."""
    page.locator("#job").get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()


def open_log(page, job_id):
    """From the overview; the lines of the log."""
    row(page, job_id).get_by_role("link", name=f"Job {job_id}").first.click()
    return page.get_by_role("log")


def go_home(page):
    page.get_by_role("link", name="\u2190").click()


def until(page, look):
    live.until(lambda: page.wait_for_timeout(20) or look())


def machine(page, name):
    return page.locator(f"[data-machine={name}]")
