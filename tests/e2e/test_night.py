"""What each GPU did and what ran on it: recorded by a service, kept over its death, told by GET /gpus/history and GET /jobs/ID/usage."""

import json
import os
import re
import shutil
import time

import live
import night

import nexus

CARDS = [{"uuid": "GPU-a", "utilization.gpu": 87, "memory.used": 4000, "temperature.gpu": 71, "power.draw": 301.4},
         {"uuid": "GPU-b", "utilization.gpu": None, "power.draw": None}]


def history(box, query="since=1h&step=10m"):
    return box.ask("GET", f"/gpus/history?{query}")


def rows(box, **wanted):
    """{(id, attempt): status} of what ran."""
    return {(row["id"], row["attempt"]): row["status"] for row in history(box, "since=7d")["rows"]}


def lanes(box, query="since=1h&step=10m"):
    return {gpu["uuid"]: gpu for gpu in history(box, query)["gpus"]}


def latest(box, uuid):
    lane = lanes(box)[uuid]
    return {name: [number for number in lane[name] if number is not None][-1:] for name in nexus.SERIES}


def test_what_nvidia_smi_says_is_recorded():
    others = [{"gpu": 1, "pid": 1, "name": "python", "memory": 9000}]
    with live.Box(gpus=CARDS, is_supervised=False) as box:
        box.show(CARDS, processes=others)
        live.until(lambda: "GPU-b" in lanes(box) and (latest(box, "GPU-b")["others"] or [0])[0] > 0, "others on GPU 1")
        told = latest(box, "GPU-a")
        assert {name: numbers for name, numbers in told.items() if name != "others"} == {
            "utilization": [87], "memory_used_mib": [4000], "temperature": [71], "power_watts": [301]}
        assert latest(box, "GPU-b")["utilization"] == [] == latest(box, "GPU-b")["power_watts"], "what it does not say is unknown"
        shown = lanes(box, "since=1h&step=10m&series=others")["GPU-a"]
        assert shown.keys() == {"uuid", "place", "name", "node", "is_gone", "others"} and shown["place"] == "0"
        assert len(shown["others"]) in (7, 8) and shown["others"][0] is None, "a time without readings is a gap"

        # Over a restart the minute goes on, and over a kill it is there.
        box.nexus("restart")
        path = box.home / "history" / "GPU-a.means"
        assert path.stat().st_size == nexus.HISTORY_BYTES
        before = path.read_bytes()
        box.kill_service()
        box.await_service()
        live.until(lambda: len(box.status()["gpu_status"]) == 2, "both cards")
        assert latest(box, "GPU-a")["temperature"] == [71] and before.count(b"\0") < len(before)

        # A card that is gone has its lane, and a gap from then on
        box.show(CARDS[1:])
        lane = live.until(lambda: next((gpu for gpu in history(box)["gpus"] if gpu["is_gone"]), None), "the loss of a card")
        assert lane["uuid"] == "GPU-a" and lane["place"] == "0" and 71 in lane["temperature"]


def test_slices_have_lanes_of_their_own():
    slices = [{"name": "1g.10gb", "uuid": "MIG-a", "used": 4000}, {"name": "2g.20gb", "uuid": "MIG-b"}]
    with live.Box(gpus=[{"name": "A100", "memory.total": 81920, "mig": slices}], is_supervised=False) as box:
        job_id = box.add("sleep 600")
        where, = box.wait_started(job_id)["gpu_uuids"]
        live.until(lambda: lanes(box).keys() >= {"MIG-a", "MIG-b"} and latest(box, "MIG-a")["memory_used_mib"] == [4000], "slices")
        assert latest(box, "MIG-a")["utilization"] == [], "nvidia-smi tells no load of a slice"
        assert [(row["id"], row["gpu_uuids"]) for row in history(box)["rows"]] == [(job_id, [where])] and where.startswith("MIG-")
        assert {lane["place"] for lane in lanes(box).values()} == {"0.0", "0.1"}


def test_what_ran_is_kept_apart_from_the_jobs():
    with live.Box(gpus=2, is_supervised=False) as box:
        good, bad, none = box.add("true", name="good", gpus=2), box.add("exit 3", gpu_ids=[0]), box.add("true", gpus=0)
        for job_id in (good, bad, none):
            box.wait(job_id)
        soft = box.add("sleep 600", preemptible=True, gpus=2)
        box.wait_started(soft)
        expected = {(good, 1): "completed", (bad, 1): "failed", (soft, 1): "running"}
        live.until(lambda: rows(box) == expected, lambda: rows(box))
        row = next(row for row in history(box)["rows"] if row["id"] == bad)
        assert (row["name"], row["outcome"], row["gpu_uuids"]) == ("exit 3", "exit 3", ["MOCK-0"])

        box.ask("POST", "/jobs/clear", {"status": "failed"})
        box.ask("POST", "/jobs/clear", {"status": "completed"})
        assert [job["id"] for job in box.ask("GET", "/jobs")] == [soft] and rows(box) == expected, "clear does not empty the night"
        box.nexus("restart")
        assert rows(box) == expected
        box.kill_all_of_service()
        # What the service did not live to write is in its state; a torn line is left out
        runs = box.home / "history" / "runs.jsonl"
        runs.write_text(runs.read_text() + '{"id": "zzz"')
        box.start()
        assert rows(box) == expected
        box.call("DELETE", f"/jobs/{soft}")
        box.wait(soft)
        assert rows(box) == {**expected, (soft, 1): "cancelled"}
        live.until(lambda: len(runs.read_text().splitlines()) == 3 and "zzz" not in runs.read_text(), runs.read_text)


def test_an_end_and_a_kill_make_one_row():
    """Of a job that has ended before the kill, of one that ends while no service is there, and of one that ends right before."""
    with live.Box(gpus=3) as box:
        before, meanwhile, right_before = ids = [box.add(f"until [ -e $HOME/go-{number} ]; do sleep 0.02; done") for number in range(3)]
        for job_id in ids:
            box.wait_started(job_id)
        (box.folder / "go-0").touch()
        box.wait(before)
        box.kill_service()
        (box.folder / "go-1").touch()
        box.await_service()
        box.wait(meanwhile)
        (box.folder / "go-2").touch()
        box.wait(right_before)
        box.kill_service()
        box.await_service()
        ended = dict.fromkeys([(job_id, 1) for job_id in ids], "completed")
        assert rows(box) == ended
        runs = box.home / "history" / "runs.jsonl"
        live.until(lambda: all(job_id in live.read(runs) for job_id in ids), "the rows on the disk")
        assert len(live.read(runs).splitlines()) == 3
        # A file that is lost is made of what State still has.
        box.kill_all_of_service()
        runs.unlink()
        box.start()
        assert rows(box) == ended


def test_history_limit_does_not_empty_the_night():
    with live.Box(gpus=1, history_limit=1, is_supervised=False) as box:
        ids = [box.add("true") for _ in range(4)]
        live.until(lambda: len(rows(box)) == 4, "all four")
        live.until(lambda: len(box.ask("GET", "/jobs")) == 1, "the history's end")
        assert rows(box) == dict.fromkeys([(job_id, 1) for job_id in ids], "completed")


def test_what_may_be_asked():
    """And that other users see that a GPU was used, and not by what."""
    with live.Box(gpus=1, is_supervised=False) as box:
        mine = box.add("exit 3", name="secret-name")
        box.wait(mine)
        token = box.nexus("token", "create", "bob").stdout.split()[-1]
        status, answer = live.ask_service(box.line(60), "GET", "/gpus/history", None, {"Authorization": f"Bearer {token}"})
        assert status == 200 and "secret-name" not in json.dumps(answer)
        row, = answer["rows"]
        assert (row["id"], row["name"], row["outcome"], row["status"]) == (mine, None, None, "failed")
        assert live.ask_service(box.line(60), "GET", f"/jobs/{mine}/usage", None, {"Authorization": f"Bearer {token}"})[0] == 403
        live.until(lambda: history(box, "")["gpus"], "its GPU")
        for query, count, step_s in (("", 1440, 60), ("since=1h", 61, 60), ("since=7d", 1009, 600), ("since=90d", 4464, 600),
                                     ("hours=1", 61, 60), ("since=24h&step=10m", 145, 600), ("since=7d&step=1m", 1440, 60)):
            found = history(box, query)
            assert found["step_seconds"] == step_s and abs(len(found["gpus"][0]["others"]) - count) <= 1, query
        for query in ("since=tomorrow", "hours=0", "step=2m", "series=fan", "merge=-1", "series="):
            assert box.call("GET", f"/gpus/history?{query}")[0] == 400, query
        described = box.ask("GET", "/openapi.json")["paths"]
        assert {row["name"] for row in described["/gpus/history"]["get"]["parameters"]} == {"since", "hours", "step", "series", "merge"}


def test_a_full_disk_is_said_once_and_holds_up_nothing():
    with live.Box(gpus=1, is_supervised=False) as box:
        box.kill_all_of_service()
        shutil.rmtree(box.home / "history", ignore_errors=True)
        (box.home / "history").write_text("no folder")          # nothing can be written into it
        box.start()
        for _ in range(3):
            job_id = box.add("true")
            box.wait(job_id, "completed")
        live.until(lambda: "the history of the GPUs has a gap" in box.log(), "the warning")
        assert box.log().count("the history of the GPUs has a gap") == 1
        (box.home / "history").unlink()
        box.wait(box.add("true"))
        live.until(lambda: len(live.read(box.home / "history" / "runs.jsonl").splitlines()) == 4, "what was kept in memory")


def move_start(box, job_id, hours):
    """Make a running job begin earlier, in state.json of a service that does not run."""
    path = box.home / "state.json"
    body = json.loads(path.read_text())
    for attempt in body["jobs"][job_id]["attempts"]:
        attempt["started_at"] -= 3600 * hours
    path.write_text(live.seal(json.dumps(body)))


def test_what_a_jobs_gpu_did():
    with live.Box(gpus=2, is_supervised=False) as box:
        short, cpu, half = box.add("sleep 600"), box.add("sleep 600", gpus=0), box.add("sleep 600", gpus=0.5)
        for job_id in (short, cpu, half):
            box.wait_started(job_id)
        assert box.ask("GET", f"/jobs/{short}/usage")["note"] == "it ran for less than 1m: that is too short for curves"
        assert box.ask("GET", f"/jobs/{cpu}/usage")["note"] == "it has no GPU that is read"
        assert box.ask("GET", f"/jobs/{box.add('true', is_held=True)}/usage")["note"] == "it has not started"
        box.nexus("stop")
        now = time.time()
        night.place_night(box.home, now, cards=2, hours=4)
        for job_id in (short, half):
            move_start(box, job_id, 2)
        box.start()
        told = box.ask("GET", f"/jobs/{short}/usage")
        gpu, = told["gpus"]
        assert told["note"] is None and told["step_seconds"] == 60 and abs(len(gpu["utilization"]) - 120) <= 3
        assert gpu["max"]["utilization"] <= 100 and gpu["mean"]["power_watts"] > 60 and gpu["place"] == "0"
        assert re.match(r"\d{4}-.*Z", told["begin"]) and abs(nexus.parse_time(told["begin"]) - (now - 7200)) < 90
        assert box.ask("GET", f"/jobs/{half}/usage")["note"] == "of the whole GPU, which it shared"


def test_a_file_that_cannot_be_written_holds_up_no_other():
    with live.Box(gpus=2, is_starting=False) as box:
        for name in ("MOCK-0.means", "runs.jsonl"):
            (box.home / "history" / name).mkdir(parents=True)
        box.start()
        box.wait(box.add("true"), "completed")
        live.until(lambda: "the history of the GPUs has a gap" in box.log(), "the warning")
        assert len(history(box, "")["gpus"]) == 2
        box.ask("POST", "/jobs/clear", {"status": "completed"})
        box.kill_service()                      # as it ends, it does not write
        box.start()
        box.nexus("stop")
        assert (box.home / "history" / "MOCK-1.means").is_file()
        for name in ("MOCK-0.means", "runs.jsonl"):
            (box.home / "history" / name).rmdir()
        os.mkfifo(box.home / "history" / "runs.jsonl")
        box.start()
        box.wait(box.add("true"), "completed")
        history(box, "")
        assert box.ask("POST", "/jobs/clear", {"status": "completed"})["ids"]
        box.wait(box.add("true"), "completed")
        assert box.nexus("stop").returncode == 0
