"""How far a job is, and what its numbers are, by what it prints."""

import pathlib

import pytest

import nexus

PROGRESS = [  # reason, what the job is, what it prints, seconds, (fraction, seconds left, by) then; None: nothing
    ("of a bar", {}, " 25%|##   | 5/20 [00:10<00:30]\r 50%|#####| 10/20 [00:20<00:20]\r", 40, (0.5, 20, "output")),
    ("not yet", {}, " 50%|#####| 10/20 [00:20<00:20]\r", 20, None),
    ("a line that is not whole", {}, "step 4/10", 40, None),
    ("of its expected time", {"expected_time": 100}, "hello\n", 40, (0.4, 60, "expected")),
    ("it takes longer than expected", {"expected_time": 100}, "hello\n", 120, None),
    ("a bar wins", {"expected_time": 100}, " 50%|#####| 10/20 [00:20<00:20]\r", 40, (0.5, 20, "output")),
    ("an inner bar, and an expected time", {"expected_time": 100}, "100%|#| 5/5 [0:10<0:00]\r 20%|#| 1/5 [0:10<0:20]\r", 40,
     (0.4, 60, "expected")),
    ("of its group", {"group": "done"}, "hello\n", 40, (0.5, 40, "group")),
    ("of a group of which none has ended", {"group": "new"}, "hello\n", 40, None),
]


@pytest.mark.parametrize("reason, fields, printed, seconds, told", PROGRESS, ids=[case[0] for case in PROGRESS])
def test_how_far_a_job_is(world, reason, fields, printed, seconds, told):
    w = world(gpus=3)
    for runtime in (60, 80, 300):
        done = w.add(group="done", gpus=0)
        w.turn()
        w.claim(done, 100)
        w.write_result(done, 0, runtime_seconds=runtime)
        w.end(done, 0, has_result=False, is_said=False)
        w.turn(seconds=60)
    w.machine.processes.find_age_s = lambda started: w.clock.ticks - began
    job_id = w.add(gpus=0, **fields)
    w.turn()
    began = w.clock.ticks
    w.claim(job_id, 101)
    watch, folder = w.service.log_watch, pathlib.Path(w.job(job_id).log_dir)
    (folder / "stderr.log").write_text(printed)
    w.turn(seconds=seconds)
    watch.look()
    job = w.api(job_id)
    assert (job["fraction"], job["progress_by"]) == ((told[0], told[2]) if told else (None, None))
    if told:
        assert abs(nexus.parse_time(job["estimated_end"]) - w.clock.now() - told[1]) <= 12, "to ten seconds"
    groups = {group["name"]: group["fraction"] for group in w.service.groups.list_groups(w.service.owner)}
    assert groups["done"] == ((3 + told[0]) / 4 if fields.get("group") == "done" else None)


PRINTED = [  # reason, what it has printed at each look, (stdout, stderr); the line with numbers then, and after its end
    ("a line of text after it", [("loss=0.5\n", ""), ("loss=0.3\nDone.\n", "")], ["loss=0.3", "loss=0.3"]),
    ("bars alone", [("", "\r 10%|#| 1/9 [00:01<00:08, loss=0.9]\r 20%|#| 2/9 [00:01<00:08, loss=0.8]")],
     ["10%|#| 1/9 [00:01<00:08, loss=0.9]", "20%|#| 2/9 [00:01<00:08, loss=0.8]"]),
    ("bars without numbers", [("loss=0.5\n", ""), ("", "\r 10%|#| 1/9 [00:01<00:08]\r 20%|#| 2/9 [00:01<00:08]\r")],
     ["loss=0.5", "loss=0.5"]),
    ("the other log", [("", "loss=0.9\n"), ("val_loss=0.2\n", ""), ("", "a warning\n")], ["val_loss=0.2", "val_loss=0.2"]),
    ("a line in two parts", [("acc=0.", ""), ("75\n", "")], ["acc=0.75", "acc=0.75"]),
    ("none", [("hello\n", "")], [None, None]),
]


@pytest.mark.parametrize("reason, printed, lines", PRINTED, ids=[case[0] for case in PRINTED])
def test_the_last_line_with_numbers(world, monkeypatch, reason, printed, lines):
    """No byte is read twice while the job runs, and none for who asks."""
    w = world(gpus=3)
    job_id = w.add(gpus=0)
    w.turn()
    w.claim(job_id, 101)
    watch, folder, reads = w.service.log_watch, pathlib.Path(w.job(job_id).log_dir), []
    read_part = nexus.read_part
    monkeypatch.setattr(nexus, "read_part", lambda disk, *part: reads.append(part) or read_part(disk, *part))
    for texts in printed:
        for name, text in zip(("stdout.log", "stderr.log"), texts):
            with open(folder / name, "a") as handle:
                handle.write(text)
        w.turn(seconds=2)
        watch.look()
    assert watch.get_metric_line(str(folder)) == lines[0]
    assert len(set(reads)) == len(reads), "each part once"
    assert w.api(job_id)["metric_line"] == lines[0]
    w.write_result(job_id, 0, runtime_seconds=9)
    w.end(job_id, 0, has_result=False, is_said=False)
    w.turn(seconds=60)
    assert w.job(job_id).current.metric_line == lines[1]
