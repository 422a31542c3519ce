"""What the rows of the overview say, and where the focus goes; the failures that one has dismissed."""

import contextlib
import hashlib
import json
import re
import time

import live
import pytest
from pages import FORWARDED, row, visit
from playwright.sync_api import expect

import nexus

BOB = "a-token-of-bobs-0000"


def fail(box, code=3, **options):
    return box.wait(box.add(f"exit {code}", gpus=0, **options), "failed")["id"]


def shown(box, **headers):
    """The failures of whoever asks, as [[id, how many, of how many kinds]]; and how many in all."""
    answer = box.call("GET", "/status?after=0", **headers)[1]
    return answer["failures"], answer["found"]["failures"]


# Failures that are dismissed

def test_a_dismissal_is_its_users_and_survives_a_restart():
    with live.Box(cpu_slots=8) as box:
        token = nexus.Token("bob", hashlib.sha256(BOB.encode()).hexdigest(), time.time())
        nexus.change_tokens(nexus.DISK, str(box.home / "tokens.json"), lambda tokens: {token.sha256: token})
        bob = {"Authorization": f"Bearer {BOB}", **FORWARDED}
        mine = fail(box)
        his = box.call("POST", "/queue", {"command": "exit 4", "gpus": 0}, **bob)[1]["id"]
        box.wait(his, "failed")
        many = [fail(box, group="sweep") for _ in range(3)]
        assert shown(box) == ([[many[2], 3, 1], [his, 1, 1], [mine, 1, 1]], 5)
        assert shown(box, **bob) == ([[his, 1, 1]], 1)
        assert box.call("POST", "/jobs/dismiss", {"ids": [mine]}, **bob)[0] == 403
        assert box.ask("POST", "/jobs/dismiss", {"group": "sweep"}) == {"ids": many}
        assert box.ask("POST", "/jobs/dismiss", {"ids": [his]}) == {"ids": [his]}
        assert box.ask("POST", "/jobs/dismiss", {"ids": [his]}) == {"ids": []}, "it was"
        box.kill_service()
        box.start()
        assert shown(box) == ([[mine, 1, 1]], 1)
        assert shown(box, **bob) == ([[his, 1, 1]], 1), "bob has not seen it yet"
        assert box.call("POST", "/jobs/dismiss", {"status": "failed"}, **bob)[1] == {"ids": [his]}
        assert shown(box, **bob) == ([], 0)
        assert box.ask("POST", "/jobs/dismiss", {"ids": many, "undo": True}) == {"ids": many}
        assert shown(box) == ([[many[2], 3, 1], [mine, 1, 1]], 4)


def test_only_failures_are_dismissed(box):
    done = box.wait(box.add("true", gpus=0), "completed")["id"]
    for body, status, words in (
            ({"ids": [done]}, 409, "is completed"), ({"ids": ["zzz"]}, 404, "no job"), ({}, 400, ""),
            ({"undo": True}, 400, "nothing says which jobs"), ({"ids": [done], "undo": "yes"}, 400, "undo")):
        answered, answer = box.call("POST", "/jobs/dismiss", body)
        assert answered == status and words in answer["message"], (body, answer)
    assert box.ask("POST", "/jobs/dismiss", {"status": "completed"}) == {"ids": []}


def test_what_stands_above_is_not_repeated_below(browser, box):
    box.wait(box.add("true", gpus=0, name="well"), "completed")
    bad, again = fail(box), fail(box)
    for _ in range(2):
        box.wait(box.ask("POST", "/queue", {"command": "true", "gpus": 0, "group": "both"})["id"], "completed")
    with visit(browser, box) as page:
        expect(page.locator("#ended-count")).to_have_text("5 · 2 failures above")
        expect(page.locator("#ended li")).to_have_count(2)              # the group is one
        page.get_by_role("button", name=f"Dismiss job {bad}").click()
        expect(page.locator("#notices")).to_contain_text("1 failure dismissed.")
        expect(page.locator(f"#ended [data-job={bad}]")).to_be_visible()
        expect(page.locator("#ended-count")).to_have_text("5 · 1 failure above")
        page.get_by_role("button", name="Undo").click()
        expect(page.locator("#notices")).to_contain_text("1 failure shown again.")
        expect(page.locator(f"#failures [data-job={bad}]")).to_be_visible()
        page.get_by_role("button", name="Dismiss all 2").click()
        expect(page.locator("#failures li")).to_have_count(0)
        expect(page).to_have_title(re.compile("^0 running"))
        page.reload()
        expect(page.locator(f"#ended [data-job={again}]")).to_be_visible()
        expect(page.locator("#failures li")).to_have_count(0)


def test_a_failure_on_a_phone_is_a_line_with_its_cause_and_another_try(browser, box):
    """A row opens the job, whose log is at the error."""
    first = box.wait(box.add("echo 'ValueError: no such file' >&2; exit 3", gpus=0, name="train"), "failed")["id"]
    many = [fail(box, group="sweep") for _ in range(3)]
    with visit(browser, box, width=390, height=844, is_expecting_errors=True) as page:
        line = page.locator(f"#failures [data-job={first}]")
        for part in (line.get_by_text("exit 3", exact=True), line.get_by_text("ValueError: no such file"),
                     line.get_by_role("button", name="Retry")):
            expect(part).to_be_visible()
        assert line.locator(".cause").evaluate("node => node.scrollWidth <= node.clientWidth"), "it is not cut"
        assert max(each.bounding_box()["height"] for each in page.locator("#failures [data-job]").all()) < 50, "one line each"
        line.get_by_role("link", name=f"Job {first}").click()
        expect(page.get_by_role("log")).to_contain_text("ValueError: no such file")
        page.go_back()
        page.get_by_role("button", name="Retry 3 failures of group sweep").click()
        expect(page.locator("#notices")).to_contain_text("3 jobs run again.")
        live.until(lambda: len(box.ask("GET", "/jobs?group=sweep")) == 2 * len(many))


def test_more_than_three_failures_are_folded(browser, box):
    ids = [fail(box) for _ in range(5)]
    with visit(browser, box) as page:
        lines = page.locator("#failures [data-job]")
        expect(lines).to_have_count(3)
        page.get_by_role("button", name="2 more").click()
        expect(lines).to_have_count(5)
        page.get_by_role("button", name="Show fewer").click()
        expect(lines).to_have_count(3)
        expect(page.locator(f"#failures [data-job={ids[4]}]")).to_be_visible()


def test_a_failure_counts_until_it_is_retried_or_dismissed(browser, box):
    """In the head, the title, the lists, and the group's row; and it can be found again."""
    alone, bad = fail(box), [fail(box, group="sweep") for _ in range(3)]
    again = box.ask("POST", "/jobs/retry", {"ids": bad[:1], "change": {"command": "true"}})["ids"][0]
    box.wait(again, "completed")
    with visit(browser, box) as page:
        failed = page.locator("#counts").get_by_role("link", name="failed")
        expect(failed).to_have_text("3 failed")
        page.get_by_role("button", name="Dismiss all 3").click()
        page.get_by_role("button", name="Undo").click()
        expect(failed).to_have_text("3 failed")
        box.ask("POST", "/jobs/dismiss", {"ids": [alone, bad[1]]})
        expect(failed).to_have_text("1 failed")
        expect(page).to_have_title(re.compile("^\u2717 1 "))
        expect(page.locator("#ended-count")).to_have_text("5 \u00b7 1 failure above")
        group = page.locator("[data-group=sweep]")
        expect(group.get_by_role("link", name="1 failed")).to_be_visible()
        expect(group.get_by_role("link", name="2 run again or dismissed")).to_be_visible()
        failed.click()
        expect(page.locator("#ended-count")).to_have_text("4 \u00b7 3 run again or dismissed")
        expect(row(page, bad[0])).to_contain_text(f"run again as {again}")
        expect(row(page, bad[1])).to_contain_text("dismissed")
        page.get_by_role("button", name=f"Show again job {bad[1]}").click()
        expect(row(page, bad[1])).not_to_contain_text("dismissed")
        expect(failed).to_have_text("2 failed")


# Where the focus goes

def has_focus(page, selector):
    page.wait_for_function("selector => document.activeElement.closest(selector)", arg=selector)


def test_the_focus_goes_to_the_next_row(browser, box):
    bad = [fail(box) for _ in range(2)]
    box.ask("POST", "/service/pause")
    ids = [box.add("true", gpus=0) for _ in range(4)]
    with visit(browser, box) as page:
        def press(name):
            page.get_by_role("button", name=name).focus()
            page.keyboard.press("Enter")

        for gone, next_row in ((0, 1), (3, 2)):
            press(f"Cancel job {ids[gone]}")
            page.get_by_role("dialog").get_by_role("button", name="Cancel job").press("Enter")
            expect(page.locator(f"#waiting [data-job={ids[gone]}]")).to_have_count(0)
            has_focus(page, f"#waiting [data-job={ids[next_row]}]")
            assert page.evaluate("document.activeElement.textContent") == "Cancel"
        press(f"Dismiss job {bad[1]}")
        has_focus(page, f"#failures [data-job={bad[0]}]")
        assert page.evaluate("document.activeElement.textContent") == "\u00d7"
        box.ask("PATCH", f"/queue/{ids[1]}", {"is_held": True})
        press(f"Resume job {ids[1]}")
        expect(page.locator("#notices")).to_contain_text(f"Job {ids[1]} was resumed.")
        has_focus(page, f"#waiting [data-job={ids[1]}]")
        press(f"Dismiss job {bad[0]}")
        has_focus(page, "main")


# What the rows say

def test_how_large_the_logs_are(browser, box):
    large = box.wait(box.add("head -c 3000000 /dev/zero | tr '\\0' x", gpus=0), "completed")["id"]
    other = box.wait(box.add("true", gpus=0), "completed")["id"]
    box.ask("POST", "/jobs/clear", {"ids": [other]})                # they are measured anew
    live.until(lambda: box.ask("GET", "/health")["disk_use"]["log_bytes"] >= 3000000)
    with visit(browser, box) as page:
        expect(page.locator("#disk-use")).to_contain_text(f"largest: {large} 3 MB")
        page.locator("#disk-use a", has_text=large).click()
        expect(page.locator("#facts")).to_be_visible()


def test_jobs_that_share_a_gpu_have_each_its_time(browser):
    with live.Box(gpus=1) as box:
        ids = [box.wait_started(box.add("sleep 1000", gpus=0.5))["id"] for _ in range(2)]
        with visit(browser, box) as page:
            for job_id in ids:
                expect(page.locator(f"#gpus [data-job={job_id}] .time")).to_have_text(re.compile(r"^\d+s$"))
            gpu = page.locator("[data-gpu='0']")
            gpu.locator("a").first.focus()
            for _ in ids:
                page.keyboard.press("Tab")
            expect(gpu.get_by_role("button", name="Pause GPU 0")).to_be_focused()
            expect(gpu.locator(".later")).to_have_css("opacity", "1")


def test_reasons_are_in_the_words_of_the_page(browser, box):
    runs = box.wait_started(box.add("sleep 1000", gpus=0))["id"]
    held = box.add("sleep 1000", gpus=0, is_held=True)
    later = [box.add("true", gpus=0, after=[runs, held]), box.add("true", gpus=0, after=[held])]
    box.ask("POST", "/gpus/1/pause")
    with visit(browser, box) as page:
        expect(row(page, held).locator(".why")).to_have_text("it is held")
        expect(row(page, later[0]).locator(".why a")).to_have_text([runs, held])
        row(page, later[1]).locator(".why").get_by_role("link", name=f"Job {held}").click()
        expect(page.get_by_role("heading", name=f"Job {held}")).to_be_focused()
        expect(page.locator("#why")).to_contain_text("it is held")
        assert "nexus resume" not in page.locator("main").inner_text()
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("#notices")).to_contain_text(f"Job {held} was resumed.")
        page.goto(page.url.split("#")[0] + f"#/jobs/{later[0]}")
        expect(page.locator("#why a")).to_have_text([runs, held])
    box.ask("POST", "/gpus/1/resume")


def test_a_job_that_has_no_place_yet_does_not_say_where_it_is(browser, box):
    box.ask("POST", "/service/pause")
    job_id, cpu = box.add("true"), box.add("true", gpus=0)
    box.ask("POST", "/service/resume")
    for each, words in ((box.wait(job_id, "completed")["id"], "where: GPU "), (box.wait(cpu, "completed")["id"], "where: CPU")):
        with visit(browser, box, f"#/jobs/{each}") as page:
            page.get_by_text("Details").click()
            expect(page.locator("#job .facts")).to_contain_text(words)
    box.ask("POST", "/service/pause")
    with visit(browser, box, f"#/jobs/{box.add('true')}") as page:
        page.get_by_text("Details").click()
        expect(page.locator("#job .facts")).to_contain_text("submitted: ")
        assert "where:" not in page.locator("#job .facts").inner_text() and "CPU" not in page.locator("#job").inner_text()


NAMES = [  # names, what can be seen of each where there is no room for the whole
    ([f"llama-sft-on-all-of-the-alpaca-data seed={seed}" for seed in (7, 8)], ["7", "8"]),
    (["an-only-one-whose-name-is-too-long-for-every-phone"], ["an-only-one"]),
    ([f"{rate} is the learning rate of a sweep of long names" for rate in ("1e-3", "1e-4")], ["1e-3", "1e-4"])]


@pytest.mark.parametrize("names, wanted", NAMES, ids=[words[0].split()[0] for words, _ in NAMES])
def test_names_are_cut_in_what_they_have_in_common(browser, box, names, wanted):
    box.ask("POST", "/service/pause")
    ids = [box.add("true", name=name, gpus=0) for name in names]
    with visit(browser, box, width=390, height=844) as page:
        for job_id, name, part in zip(ids, names, wanted):
            link = row(page, job_id).get_by_role("link", name=f"Job {job_id}").first
            assert link.locator(".name").text_content() == name
            pieces = link.locator(".name .clip").all()
            piece = next(each for each in reversed(pieces) if part in each.text_content())
            # the part is within what is seen of its piece
            assert piece.evaluate("""(node, part) => {
                const range = document.createRange(), at = node.textContent.indexOf(part);
                range.setStart(node.firstChild, at);
                range.setEnd(node.firstChild, at + part.length);
                return range.getBoundingClientRect().right <= node.getBoundingClientRect().right + 1;
            }""", part), name
        page.set_viewport_size({"width": 1600, "height": 900})
        for job_id in ids:
            cut = "nodes => nodes.filter((node) => node.scrollWidth > node.clientWidth + 1).length"
            assert row(page, job_id).locator(".name .clip").evaluate_all(cut) == 0, "there is room"


SWEEP = ["lr=1e-3,1e-4", "bs=32,64,128"]


@pytest.mark.parametrize("width", [1600, 1024, 820, 390])
def test_rows_of_a_sweep_say_whole_what_tells_them_apart(browser, box, width):
    box.ask("POST", "/service/pause")
    ids = box.ask("POST", "/queue", {"command": "python train.py --data /scratch/imagenet --lr {lr} --bs {bs} --out {bs}", "gpus": 0,
                                     "name": "a-long-name-that-all-of-them-have", "sweep": SWEEP})["ids"]
    loop = [box.add(f"python train.py --data /scratch/imagenet-1k/train --seed {seed} --out runs", gpus=0) for seed in (7, 8)]
    told = dict(zip([*ids, *loop], [*(f"lr={rate} bs={size}" for rate in ("1e-3", "1e-4") for size in (32, 64, 128)),
                                    "train.py --seed 7", "train.py --seed 8"]))
    with visit(browser, box, width=width) as page:
        for job_id, text in told.items():
            label = row(page, job_id).locator(".label")
            expect(label).to_have_text(text)
            assert label.evaluate("(node) => node.scrollWidth <= node.clientWidth && getComputedStyle(node).textOverflow != 'ellipsis'")
            assert label.locator(".word").evaluate_all("nodes => nodes.every((node) => node.getBoundingClientRect().height < 30)")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_group_is_offered_where_its_name_has_the_text(browser, box):
    box.ask("POST", "/service/pause")
    for group in ("imagenet", "cifar"):
        box.ask("POST", "/queue", [{"command": "true", "gpus": 0, "group": group}] * 2)
    with visit(browser, box) as page:
        page.get_by_label("Filter jobs").fill("IMAGE")
        expect(page.locator("#named [data-group]")).to_have_count(1)
        page.locator("#named").get_by_role("link", name="imagenet", exact=True).click()
        expect(page.locator("#results")).to_be_visible()


@pytest.mark.parametrize("width", [1600, 1300, 1024, 820, 700, 390])
def test_nothing_of_a_row_lies_on_its_neighbour(browser, box, width):
    """What a running job prints is there only where it can be read."""
    for number in range(2):
        box.wait(box.add(f"echo 'ValueError: {'far too long ' * 9}' >&2; exit 3", gpus=0, group="sweep", name=f"seed={number}"), "failed")
    box.wait_started(box.add("echo epoch 3/10 loss: 0.25 and more that is told; sleep 1000", name="a name that is long enough to matter"))

    def progress(document):
        for job in document.get("jobs", {}).values():
            if job and job.get("status") == "running":
                job.update(fraction=0.41, progress_by="output", estimated_end="2100-01-01T00:00:00Z", last_line="epoch 3/10 loss: 0.25")

    with visit(browser, box, width=width) as page, changed_status(page, progress):
        page.reload()
        expect(page.locator("#gpus .far")).to_be_visible()
        assert page.evaluate("""() => [...document.querySelectorAll('.rows > li, .use')].flatMap((line) => {
            const parts = [...line.children].filter((node) => node.checkVisibility() && !node.matches('.later'))
              .map((node) => [node, node.getBoundingClientRect()]);
            return parts.flatMap(([node, box], index) => parts.slice(index + 1).filter(([, other]) =>
              box.right > other.left + 1 && other.right > box.left + 1 && box.bottom > other.top + 1 && other.bottom > box.top + 1)
              .map(([other]) => `${node.className}: ${node.textContent} / ${other.className}: ${other.textContent}`));
        })""") == []
        lines = page.locator(".line > .clip").evaluate_all(
            "nodes => nodes.filter((node) => node.checkVisibility()).map((node) => node.clientWidth)")
        assert all(each > 60 for each in lines), lines
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@contextlib.contextmanager
def changed_status(page, change):
    """The service's answers, with what is rare."""
    def answer(route):
        reply = route.fetch()
        document = reply.json()
        change(document)
        route.fulfill(response=reply, body=json.dumps(document))

    page.route("**/status?*", answer)
    yield
    page.unroute_all(behavior="ignoreErrors")


def test_preemptions_stand_in_the_row(browser, box):
    job_id = box.wait_started(box.add("sleep 1000", gpus=0))["id"]

    def preempt(document):
        if job_id in document.get("jobs", {}):
            document["jobs"][job_id].update(preemptions=3, preempted_seconds=860.5)

    with visit(browser, box, width=390, height=844) as page, changed_status(page, preempt):
        page.reload()
        expect(row(page, job_id)).to_contain_text("3 \u00d7 preempted, 14m lost")


@pytest.mark.parametrize("width", [1600, 390])
def test_what_a_gpu_is_used_for_has_room(browser, box, width):
    note = "is in use by ann (pid 123456 /opt/conda/envs/a-long-name/bin/python3.11, 71.5 GB), bob (pid 234567 python3, 1.2 GB)"

    def occupy(document):
        for gpu in document.get("gpus", {}).values():
            gpu.update(state="Unavailable", unavailable=note, is_available=False)

    with visit(browser, box, width=width) as page, changed_status(page, occupy):
        page.reload()
        expect(page.locator("[data-gpu='0']")).to_contain_text(note)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_finger_opens_a_job_from_anywhere_in_its_row(browser, box):
    job_id = box.wait(box.add("echo 'ValueError: lost' >&2; exit 3", gpus=0, name="train"), "failed")["id"]
    waits = box.add("true", gpus=0, is_held=True, name="waits")
    with visit(browser, box, width=390, height=844, has_touch=True, is_mobile=True, is_expecting_errors=True) as page:
        for each, text in ((job_id, "ValueError: lost"), (waits, "it is held")):
            place = row(page, each).get_by_text(text).bounding_box()
            page.touchscreen.tap(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
            expect(page.get_by_role("heading", name=f"Job {each}")).to_be_focused()
            page.go_back()
        row(page, waits).get_by_role("button", name="Resume").tap()     # a button stays one
        box.wait(waits, "completed")
        heights = page.locator(".rows :is(.actions, .group) a, .rows button").evaluate_all(
            "nodes => nodes.filter((node) => node.checkVisibility()).map((node) => node.getBoundingClientRect().height)")
        assert heights and min(heights) >= 36


def test_a_failures_log_is_seen_at_its_error(browser, box):
    job_id = box.wait(box.add("seq 500; echo 'ValueError: lost' >&2; seq 501 900; exit 3", gpus=0), "failed")["id"]
    seen = "node => { const {top, bottom} = node.getBoundingClientRect(); return top >= 0 && bottom <= innerHeight; }"
    with visit(browser, box, width=390, height=700) as page:
        row(page, job_id).get_by_role("link", name=f"Job {job_id}").click()
        marked = page.locator(".lines .marked")
        expect(marked).to_have_text("ValueError: lost")
        page.wait_for_function("() => scrollY > 0")
        assert marked.evaluate(seen)
        page.evaluate("scrollTo(0, 0)")
        page.get_by_role("button", name="Go to the error").click()
        page.wait_for_function("() => scrollY > 0")
        assert marked.evaluate(seen)
    assert box.job(job_id)["cause_line"] == "ValueError: lost"


def test_a_failures_page_says_what_may_help(browser, box):
    """As `nexus show` does, by its cause; of other failures it says nothing."""
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
    for command, says in ((f"echo '{line}' >&2; exit 1", True), ("echo 'ValueError: lost' >&2; exit 1", False)):
        job_id = box.wait(box.add(command, gpus=1), "failed")["id"]
        with visit(browser, box, f"#/jobs/{job_id}") as page:
            expect(page.get_by_text(line if says else "ValueError: lost").first).to_be_visible()
            help = page.get_by_text(f"What may help, on the machine: nexus retry {job_id} --env PYTORCH_CUDA_ALLOC_CONF=")
            expect(help).to_have_count(int(says))


@pytest.mark.parametrize("group", ["constructor", "__proto__"])
def test_a_group_may_have_any_name(browser, box, group):
    """It comes to a page that shows others already."""
    box.ask("POST", "/service/pause")
    for _ in range(2):
        box.add("true", gpus=0, group="first")
    with visit(browser, box) as page:
        expect(page.locator("[data-group=first]")).to_be_visible()
        box.ask("POST", "/queue", {"commands": ["true"] * 2, "gpus": 0, "group": group})
        expect(page.locator(f"[data-group={group}]")).to_be_visible()
        expect(page.locator("[data-group=first]")).to_be_visible()


def test_a_gpu_that_is_kept_does_not_look_free(browser):
    with live.Box(gpus=2, reserve_after_seconds=0.1) as box:
        box.wait_started(box.add("sleep 600"))
        both = box.add("true", gpus=2)
        with visit(browser, box) as page:
            kept = page.locator("[data-gpu='1']")
            expect(kept).to_contain_text(f"Kept for {both} (2 GPUs)")
            expect(kept).not_to_contain_text("Available")
            expect(page.locator("#gpus")).to_contain_text("0 of 2 available")
