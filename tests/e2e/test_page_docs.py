"""/docs in a browser; and pages of others, open in the same one."""

import contextlib
import http.server
import json
import threading

import live
import pytest
import samples
from pages import FORWARDED, axe, visit
from playwright.sync_api import expect

import nexus


def try_call(page, name):
    """The form of an operation, open_file."""
    call = page.locator(f"#{name}")
    if not call.evaluate("call => call.open"):
        call.locator("summary").first.click()
    return call


def test_docs_show_every_call_and_let_one_try_them(browser, box):
    with visit(browser, box, "docs", is_waiting=False) as page:
        expect(page.locator("#calls > details:has(pre)")).to_have_count(len(nexus.ROUTES))
        expect(page.locator("#about code").first).to_have_text("Authorization: Bearer TOKEN")
        box.ask("POST", "/service/pause")
        call = try_call(page, "post_queue")
        expect(call.locator("dl").first).to_contain_text("the same again adds nothing")
        expect(call.locator("dl").nth(1)).to_contain_text("where it runs")
        expect(call.locator("dl").nth(1)).to_contain_text("(integer | string)[] | string")
        call.get_by_label("Body").fill('{"command": "true # it\'s", "gpus": 0}')
        expect(call.get_by_label("the same with curl")).to_contain_text("true # it'\\''s")
        call.get_by_role("button", name="Send").click()
        expect(call.locator("form [aria-live]")).to_contain_text("200 OK")
        job_id = json.loads(call.get_by_label("the answer", exact=True).text_content())["id"]
        call = try_call(page, "get_jobs_id")
        expect(call.get_by_label("the same with curl")).to_contain_text("/jobs/ID")
        call.get_by_label("Address").fill(f"jobs/{job_id}")
        expect(call.get_by_label("the same with curl")).to_contain_text(f"/jobs/{job_id}")
        call.get_by_label("Address").press("Enter")
        expect(call.get_by_label("the answer", exact=True)).to_contain_text('"command": "true # it\'s"')
        box.call("DELETE", f"/queue/{job_id}")
        curl_command = try_call(page, "post_api_submit").get_by_label("the same with curl")
        expect(curl_command).to_contain_text("-F code=@code -F config_file=@config_file")


def test_docs_keep_the_token_for_the_tab_and_send_it(browser, box):
    with visit(browser, box, "docs", is_expecting_errors=True, is_waiting=False, extra_http_headers=FORWARDED) as page:
        field = page.get_by_role("dialog").get_by_label("Token")
        call = try_call(page, "get_jobs")
        call.get_by_label("Address").fill("jobs?group=kept")
        call.get_by_role("button", name="Send").click()
        expect(page.locator("#login")).to_contain_text("needs a token")
        field.fill("wrong")
        field.press("Enter")
        expect(call.get_by_label("the same with curl")).to_contain_text("Bearer $NEXUS_TOKEN")
        call.get_by_role("button", name="Send").click()
        expect(field).to_be_focused()
        expect(page.locator("#login")).to_contain_text("the token is not right")
        expect(call.locator("form [aria-live]")).to_contain_text("401")
        field.fill((box.home / "token").read_text().strip())
        field.press("Enter")
        expect(call.get_by_label("the same with curl")).to_contain_text("Bearer $NEXUS_TOKEN")
        call.get_by_role("button", name="Send").click()
        expect(call.locator("form [aria-live]")).to_contain_text("200 OK")
        expect(call.get_by_label("Address")).to_have_value("jobs?group=kept")
        expect(call.get_by_label("the same with curl")).to_contain_text("/jobs?group=kept")
        page.reload()
        call = try_call(page, "get_jobs")
        call.get_by_role("button", name="Send").click()
        expect(call.locator("form [aria-live]")).to_contain_text("200 OK")
        expect(page.get_by_role("button", name="Forget the token")).to_be_visible()


@pytest.mark.parametrize("width, scheme", samples.choose([(360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")], 1))
def test_docs_are_for_everybody(browser, box, scheme, width):
    with visit(browser, box, "docs", width=width, color_scheme=scheme, is_waiting=False) as page:
        expect(page.locator("#post_queue")).to_be_visible()
        page.locator("#get_jobs > summary").focus()
        page.keyboard.press("Enter")            # by keyboard alone
        page.locator("#get_jobs").get_by_label("Address").focus()
        page.keyboard.press("End")
        page.keyboard.type("?limit=1")
        page.keyboard.press("Enter")
        expect(page.locator("#get_jobs form [aria-live]")).to_contain_text("200 OK")
        try_call(page, "post_queue")
        try_call(page, "shape-Job")
        assert axe(page) == []
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


# Somebody else had the port while nexus was stopped

PLANTED_PAGE = b"""<!doctype html><title>planted</title>
<script>
navigator.serviceWorker.register('/app/worker.js', {scope: '/'});
navigator.serviceWorker.ready.then(() => { document.title = 'ready'; });
</script>"""
PLANTED_WORKER = b"""
addEventListener('install', () => skipWaiting());
addEventListener('activate', (event) => event.waitUntil(clients.claim()));
addEventListener('fetch', (event) => {
  const page = new Response('<title>planted</title>', {headers: {'Content-Type': 'text/html'}});
  if (event.request.mode === 'navigate') event.respondWith(page);
});
"""


class Planter(http.server.BaseHTTPRequestHandler):
    """A page that wants to stay: its service worker answers in place of whoever has the port later."""

    def do_GET(self):
        kind, body = ("text/javascript", PLANTED_WORKER) if self.path == "/app/worker.js" else ("text/html", PLANTED_PAGE)
        self.send_response(200)
        for name, text in (("Content-Type", kind), ("Content-Length", len(body)), ("Service-Worker-Allowed", "/"),
                           ("Cache-Control", "max-age=31536000, immutable")):
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_the_service_worker_of_somebody_else_is_removed(browser):
    with live.Box(gpus=1, is_starting=False) as box, contextlib.ExitStack() as stack:
        planter = http.server.ThreadingHTTPServer(("127.0.0.1", box.port), Planter)     # a browser connects before it has to ask
        planter.daemon_threads = True
        thread = threading.Thread(target=planter.serve_forever, args=(0.01,))
        thread.start()
        context = browser.new_context()
        stack.callback(context.close)
        page = context.new_page()
        page.goto(f"http://localhost:{box.port}/")
        expect(page).to_have_title("ready")
        page.goto("about:blank")
        planter.shutdown()
        planter.server_close()
        thread.join()
        box.start()
        assert page.goto(f"http://localhost:{box.port}/").from_service_worker, "the browser does not ask nexus for it"
        expect(page.locator("#connection")).to_have_text("live")
        assert page.evaluate("navigator.serviceWorker.getRegistrations().then((found) => found.length)") == 0


# Pages of other sites, open in the same browser

class Stranger(http.server.BaseHTTPRequestHandler):
    """An empty page, for a test's scripts."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, *_):
        pass


# What another site's page learns of an address: {way: what it is told}
PROBES = """async (address) => {
    const add = (name, facts, told = ['load', 'error']) => new Promise((tell) => {
        const node = Object.assign(document.createElement(name), facts);
        for (const event of told) node.addEventListener(event, () => tell(event));
        document.body.append(node);
    });
    const ended = (promise) => promise.then((answer) => `${answer.type} ${answer.status}`, () => 'error');
    const ways = {
        img: add('img', {src: address}), script: add('script', {src: address}), object: add('object', {data: address}),
        iframe: add('iframe', {src: address}), embed: add('embed', {src: address}), video: add('video', {src: address}),
        style: add('link', {rel: 'stylesheet', href: address}), prefetch: add('link', {rel: 'prefetch', href: address}),
        preload: add('link', {rel: 'preload', as: 'fetch', href: address}), module: ended(import(address)),
        fetch: ended(fetch(address, {mode: 'no-cors'})), head: ended(fetch(address, {mode: 'no-cors', method: 'HEAD'})),
        cors: ended(fetch(address)),
    };
    const found = {};
    for (const [way, told] of Object.entries(ways)) found[way] = await told;
    return found;
}"""
OPENED = """(address) => new Promise((tell) => {
    const opened = window.open(address);
    const look = () => opened.closed ? tell('out of reach') : setTimeout(look, 20);
    look();
})"""


def test_a_page_of_another_site_learns_nothing(browser, box):
    """Not whether a text is in a job's command, neither on another port nor under another name of this machine."""
    box.add("sleep 600 # key-5f3a", gpus=0)
    right, wrong = (f"/jobs?text={text}" for text in ("key-5f3a", "key-0000"))
    assert [len(box.ask("GET", path)) for path in (right, wrong)] == [1, 0]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as stranger, contextlib.ExitStack() as stack:
        threading.Thread(target=stranger.serve_forever, args=(0.01,)).start()
        stack.callback(stranger.shutdown)
        context = browser.new_context()
        stack.callback(context.close)
        for its_name, our_name in (("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("a.localhost", "localhost")):
            page, statuses = context.new_page(), set()
            page.goto(f"http://{its_name}:{stranger.server_address[1]}/")
            page.on("response", lambda answer, seen=statuses: "text=" in answer.url and seen.add(answer.status))
            ours = f"http://{our_name}:{box.port}"
            told = [page.evaluate(PROBES, ours + path) for path in (right, wrong)]
            assert told[0] == told[1] and statuses == {403}, (its_name, told)
            assert [page.evaluate(OPENED, ours + path) for path in (right, wrong)] == ["out of reach"] * 2
            page.evaluate("(address) => document.body.append(Object.assign(document.createElement('a'), {href: address, text: 'nexus'}))",
                          f"{ours}/")
            page.get_by_role("link", name="nexus").click()
            expect(page.locator("#connection")).to_have_text("live")
