"""The page in Firefox, Debian's own."""

import contextlib
import json
import shutil
import socket
import subprocess

import live
import pytest


class Firefox:
    """Driven by its own protocol, Marionette: LENGTH:[0, number, command, parameters], answered by [1, number, error, result]."""

    def __init__(self, folder):
        port = live.free_port()
        facts = {"marionette.port": port, "browser.aboutwelcome.enabled": False, "browser.shell.checkDefaultBrowser": False,
                 "datareporting.policy.dataSubmissionEnabled": False, "network.manage-offline-status": False, "dom.ipc.processCount": 1,
                 "fission.autostart": False, "browser.startup.page": 0, "browser.newtab.preload": False, "extensions.enabledScopes": 0,
                 "browser.safebrowsing.malware.enabled": False, "app.normandy.enabled": False, "dom.ipc.processPrelaunch.enabled": False}
        (folder / "user.js").write_text("".join(f'user_pref("{name}", {json.dumps(fact)});\n' for name, fact in facts.items()))
        self.process = subprocess.Popen([shutil.which("firefox-esr"), "--headless", "--marionette", "--no-remote", "--profile", folder],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.line = self.number = 0
        live.until(lambda: self.connect(port), "Firefox", live.PATIENCE_S)
        self.read()                             # who it is
        self.ask("WebDriver:NewSession", capabilities={})

    def connect(self, port):
        with contextlib.suppress(OSError):
            self.line = socket.create_connection(("127.0.0.1", port), live.PATIENCE_S)
        return self.line

    def read(self):
        length = b""
        while (digit := self.line.recv(1)) != b":":
            length += digit
        content = b""
        while len(content) < int(length):
            content += self.line.recv(65536)
        return json.loads(content)

    def ask(self, command, **parameters):
        self.number += 1
        message = json.dumps([0, self.number, command, parameters]).encode()
        self.line.sendall(b"%d:%s" % (len(message), message))
        _, number, error, result = self.read()
        assert number == self.number and not error, (command, error)
        return result

    def navigate(self, url):
        self.ask("WebDriver:Navigate", url=url)

    def execute(self, script, *arguments):
        return self.ask("WebDriver:ExecuteScript", script=script, args=arguments)["value"]


@pytest.fixture
def firefox(tmp_path):
    driver = Firefox(tmp_path)
    yield driver
    driver.process.terminate()
    driver.process.wait(live.PATIENCE_S)
    driver.line.close()


def test_firefox_shows_and_does_the_same(firefox, box):
    turns = "for i in 1 2; do echo out $i; sleep 0.3; echo err $i >&2; sleep 0.3; done; exit 3"
    failed = box.wait(box.add(turns, gpus=0, name="a failure"), "failed")["id"]
    box.ask("POST", "/service/pause")
    ids = box.ask("POST", "/queue", [{"command": "true", "group": "by firefox"}] * 3)["ids"]

    def shows(selector, text):
        script = "return document.querySelector(arguments[0])?.innerText ?? ''"
        live.until(lambda: text in firefox.execute(script, selector), lambda: f"{text} in {selector} of a page that is " + (
            firefox.execute("return (document.hidden ? 'hidden: ' : 'seen: ') + document.body.innerText")), live.PATIENCE_S)

    def click(selector):
        firefox.execute("document.querySelector(arguments[0]).click()", selector)

    firefox.navigate(f"http://127.0.0.1:{box.port}/")
    shows("#connection", "live")
    shows("#gpus", "2 of 2 available")
    shows("#failures", failed)
    shows("[data-group='by firefox']", "3 waiting")
    click("[data-group='by firefox'] a.title")
    shows("#results", ids[2])
    click("#lists .head button:nth-of-type(2)")         # pending
    shows("#waiting", ids[2])
    click(f"[data-job={ids[0]}] button")
    click("dialog .danger")
    click("#lists .head button:nth-of-type(2)")
    shows(f"#results [data-job={ids[0]}]", "cancelled")
    firefox.navigate(f"http://127.0.0.1:{box.port}/#/jobs/{failed}")
    shows("#job h1", f"Job {failed}: a failure")
    shows(".lines", "out 1\nerr 1\nout 2\nerr 2")
    assert firefox.execute("return document.documentElement.scrollWidth <= innerWidth")
    box.ask("POST", "/service/resume")
    firefox.navigate(f"http://127.0.0.1:{box.port}/docs")
    shows("#calls", "/jobs/cancel")
