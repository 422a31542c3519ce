"""nexus logs: of one job and of several, followed, searched, with times; and what else shows of them."""

import re
import shutil
import time

import live
import pytest
from console import Home, add, add_and_wait
from live import read, until

import nexus


def test_logs(home):
    job_id = add_and_wait(home, "echo one; echo two; echo err >&2")
    for options, out, err in ([[], "one\ntwo\n", "err\n"], [["--stream", "stdout"], "one\ntwo\n", ""],
                              [["-f", "-n", "2"], "two\n", "err\n"], [["-n", "0"], "", ""]):
        done = home.main("logs", job_id, *options)
        assert (done.code, done.out, done.err) == (0, out, err), options
    assert home.main("logs").out == "one\ntwo\n" and f"job {job_id}, completed: echo one" in home.main("logs").err
    log = home.main("logs", "service", "-n", "2")
    assert log.code == 0 and len(log.out.splitlines()) == 2 and re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ", log.out)


def test_logs_of_several_jobs_have_their_names(home):
    gate = home.folder / "have times"           # a job that ends before the service has looked at its logs has none
    waiting = f"until [ -e '{gate}' ]; do sleep 0.05; done"
    first = add(home, f"echo one; echo two; echo err >&2; {waiting}", "--name", "long name")
    second = add(home, f"echo three; {waiting}")
    live.until(lambda: len(re.findall(r"\| \d{4}-.* (?:two|three)\n", home.main("logs", first, second, "--timestamps").out)) == 2, "times")
    gate.touch()
    assert home.main("wait", first, second).code == 0
    for words in (["logs", first, second], ["logs", "-f", first, second, first]):
        done = home.main(*words)
        assert (done.code, done.out) == (0, f"long name | one\nlong name | two\n{second:9} | three\n"), words
        assert done.err == "long name | err\n"
    assert home.main("logs", second, first).out.startswith(f"{second:9} | three\n"), "in the order in which they are named"
    done = home.main("logs", first, second, "-n", "1", "--stream", "stdout", "--timestamps")
    assert re.fullmatch(rf"(?:(?:long name|{second:9}) \| \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d (?:two|three)\n){{2}}", done.out), done
    command = "printf '10%%\\r20%%'; [ -e gate ] || { touch gate; exit 3; }"
    alike = add_and_wait(home, command, "--name", "long name", "--retries", "1", "--cwd", home.top)
    done = home.main("logs", first, alike)
    assert done.out == f"long name {first} | one\nlong name {first} | two\n" + f"long name {alike} | 20%\n" * 2
    assert f"nexus: job {alike}: attempt 2, " in done.err
    assert home.main("logs", "--group", "gruop").code == 3 and "both" in home.main("logs", first, "--group", "g").err


def test_logs_of_a_group_are_followed_until_all_of_it_has_ended(home):
    """Jobs that join it later too; of those that wait nothing is lost."""
    gates = [home.folder / f"gate{number}" for number in range(3)]
    first = add(home, f"echo one; echo bad >&2; until [ -e {gates[0]} ]; do sleep 0.05; done; echo ' 10%\r 20%'; exit 3",
                "--group", "g", "--name", "a b")
    ended = add_and_wait(home, "echo over", "--group", "g")
    waiting = add(home, f"until [ -e {gates[1]} ]; do sleep 0.05; done; seq 3", "--group", "g", "--after-any", first)
    never = add(home, "true", "--group", "g", "--after", first)
    process = home.popen("logs", "-f", "-n", "2", "--group", "g")
    shown = {process.stdout.readline().decode() for _ in range(2)}
    assert shown == {f"{label:3} | {line}\n" for label, line in (("a b", "one"), (ended, "over"))}
    gates[0].touch()
    assert process.stdout.readline().decode() == "a b |  20%\n"
    later = add(home, f"seq 4; until [ -e {gates[2]} ]; do sleep 0.05; done", "--group", "g", "--name", "joined")
    assert [process.stdout.readline().decode() for _ in range(4)] == [f"joined | {number}\n" for number in range(1, 5)], "all of it"
    gates[1].touch()
    assert [process.stdout.readline().decode() for _ in range(3)] == [f"{waiting:6} | {number}\n" for number in range(1, 4)]
    assert process.poll() is None, "one still runs"
    gates[2].touch()
    rest, words = process.communicate(timeout=live.PATIENCE_S)
    assert (process.returncode, rest) == (0, b"")
    told = [f"job {first} failed (exit 3)", f"job {never} never ran", f"job {waiting} completed", f"job {later} completed"]
    assert all(f"nexus: {line}" in words.decode() for line in told), words
    done = home.main("logs", "--group", "g")
    assert set(done.out.splitlines()) == {f"{name:6} | {line}" for name, lines in (
        ("a b", ["one", " 20%"]), (ended, ["over"]), (waiting, "123"), ("joined", "1234")) for line in lines}
    assert done.out.startswith("a b") and done.err.count("a b    | bad\n") == 1
    with home.terminal("logs", "--group", "g", "-n", "1", "--stream", "stdout") as terminal:
        code, shown = terminal.end()
    labels = [(match[1], match[2]) for line in shown.splitlines() if (match := re.match(r"\x1b\[(\d+)m(.*) \|\x1b\[0m ", line))]
    assert code == 0 and {name.strip() for _, name in labels} == {"a b", ended, waiting, "joined"}
    assert len({colour for colour, _ in labels}) == 4 and {len(name) for _, name in labels} == {6}, "a colour each"
    held = add(home, "true", "--group", "h", "--begin", "+2h")
    assert f"pending: {held}" in home.main("logs", "--group", "h").err


def test_logs_of_a_job_that_waits_are_followed_from_its_start(home):
    home.main("pause")
    job_id = add(home, "echo begun")
    assert home.main("logs", job_id).out == ""
    process = home.popen("logs", "-f", job_id)
    time.sleep(0.2)
    home.main("resume")
    assert process.communicate(timeout=60)[0] == b"begun\n" and process.returncode == 0


def test_logs_come_in_order_with_their_times_attempt_by_attempt(fresh_home):
    home = fresh_home
    home.kill_service()
    home.serve("nexus.LOG_LOOK_BACKOFF_FACTOR = 1")     # rather than 20: then one slow look puts the next one off past three lines
    turns = "for i in 1 2; do echo out $i; sleep 0.3; echo err $i >&2; sleep 0.3; done; [ -e done ] || { touch done; exit 3; }"
    job_id = home.main("add", turns, "--retries", "1", "--cwd", home.top).id
    assert home.main("wait", job_id).code == 0
    lines = ["out 1", "err 1", "out 2", "err 2"]
    with home.terminal("logs", job_id) as terminal:
        shown = terminal.end()[1].splitlines()
    assert shown[:4] == shown[5:] == lines and re.fullmatch(r"nexus: attempt 2, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", shown[4]), shown
    shown = home.main("show", job_id).out
    assert "Last lines\n  err 2\n" + "".join(f"  {line}\n" for line in lines) in shown and "----" not in shown, shown
    alike = home.main("add", "echo one; echo '---- attempt 9, noon ----'").id
    assert home.main("wait", alike).code == 0
    assert "Last lines\n  one\n  ---- attempt 9, noon ----\n" in home.main("show", alike).out, "the job's own words"
    done = home.main("logs", job_id, "--timestamps", "--stream", "stdout")
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d out [12]\n){4}", done.out) and "attempt 2" in done.err
    long = home.main("add", "head -c 200000 /dev/zero | tr '\\0' x; echo").id
    assert home.main("wait", long).code == 0
    assert re.fullmatch(r"[-: .\d]{21,22} x{200000}\n", home.main("logs", long, "--timestamps").out)


def test_logs_are_searched(home):
    job_id = add_and_wait(home, "seq 20; echo Loss NaN >&2; echo loss 0.1")
    for words, code, out, err in ((["--grep", "loss"], 0, "loss 0.1\n", "Loss NaN\n"), (["--grep", "Loss"], 0, "", "Loss NaN\n"),
                                  (["--grep", "l.ss"], 1, "", ""), (["--grep", "9", "-C", "1"], 0, "8\n9\n10\n--\n18\n19\n20\n", ""),
                                  (["--grep", "19", "-n", "4", "--stream", "stdout"], 0, "19\n", ""),
                                  (["-f", "--grep", "20"], 0, "20\n", "")):
        done = home.main("logs", job_id, *words)
        assert (done.code, done.out, done.err) == (code, out, err), words
    other = add_and_wait(home, "echo no", "--group", "searched")
    done = home.main("logs", job_id, other, "--grep", "no")
    assert (done.code, done.out) == (0, f"{other} | no\n") and home.main("logs", "--group", "searched", "--grep", "yes").code == 1
    for words in (["--grep", ""], ["-C", "1"], ["--grep", "a", "-C", "101"]):
        assert home.main("logs", job_id, *words).code == 2, words
    assert "| grep" in home.main("logs", "service", "--grep", "x").err


def test_a_search_in_a_log_of_any_size_goes_on_to_its_end():
    """In three replies, while two others search; the service needs no more memory for it."""
    with Home(cpu_slots=20, launcher="direct") as home:
        home.serve("nexus.MAX_SEARCH_BYTES //= 32")
        job_id = add_and_wait(home)
        with open(home.file("logs", f"job_{job_id}", "stdout.log"), "wb") as file:
            for number in range(20):
                file.seek(number * 2**20)
                file.write(b"\nneedle %d\n" % number)
            file.write(b"3%\rneedle 4%\r5%\n")

        def peak_kib():
            return int(re.search(r"VmHWM:\s+(\d+)", read(f"/proc/{home.service['pid']}/status"))[1])

        before = peak_kib()
        searches = [home.popen("logs", job_id, "--grep", "needle") for _ in range(3)]
        found = [search.communicate(timeout=live.PATIENCE_S) for search in searches]
        assert [search.returncode for search in searches] == [0, 0, 0] and {err for _, err in found} == {b""}
        assert {out for out, _ in found} == {b"".join(b"needle %d\n" % number for number in range(20))}
        assert peak_kib() - before < 8000, "of 20 MB"
        assert b"".join(home.client().logs(job_id, grep="needle 1", context=0)).count(b"\n") == 11


PROGRESS = [  # words, what is shown of 1%\r2%\r\nend\r\nlast 1\rlast 2\r
    ([], "1%\r2%\r\nend\r\nlast 1\rlast 2\r"), (["-n", "1"], "last 2"), (["-n", "2"], "end\r\nlast 2"),
    (["-n", "9"], "2%\r\nend\r\nlast 2"),
    (["-f"], "1%\r2%\r\nend\r\nlast 1\rlast 2\r"), (["-f", "-n", "1"], "last 2\r")]


def test_of_a_progress_bar_the_last_lines_have_its_last_state(home):
    job_id = add_and_wait(home, r"printf '1%%\r2%%\r\nend\r\nlast 1\r'; sleep 0.1; printf 'last 2\r'")
    for words, shown in PROGRESS:
        assert home.run("logs", job_id, *words).bytes == shown.encode(), words


def test_a_long_progress_bar_is_neither_sent_nor_shown_whole(home):
    """It was: 3.5 s and 180 MB for `show`."""
    job_id = add_and_wait(home, "echo begin; echo end")
    until(lambda: not live.find_commands(f"job_{job_id}"), "the end of its screen")
    bar = b"".join(b"\r%7d/600000 %s" % (number, b"#" * 85) for number in range(1000)) * 600
    home.file("logs", f"job_{job_id}", "stderr.log").write_bytes(bar)
    last = bar[-99:].decode().strip()

    def moved():
        """Bytes that the service has read and write_aside."""
        lines = dict(line.split(": ") for line in read(f"/proc/{home.service['pid']}/io").splitlines())
        return int(lines["rchar"]), int(lines["wchar"])

    read_before, wrote_before = moved()
    done = home.run("show", job_id)
    read_after, wrote_after = moved()
    assert all(f"  {line}\n" in done.out for line in (last, "begin", "end")), done
    assert read_after - read_before < 2e7 and wrote_after - wrote_before < 1e6, "of 60 MB"
    for words, out, err in (([], "begin\nend\n", last), (["-n", "3"], "begin\nend\n", last), (["-n", "2"], "end\n", last),
                            (["-n", "1", "--stream", "stdout"], "end\n", "")):
        done = home.run("logs", job_id, *words)
        assert (done.out, done.err.strip()) == (out, err), words
    assert moved()[1] - wrote_after < 1e5


LAST_LINES = [  # command, its last line, its cause's line
    ("echo a; echo b", "b", None), ("echo out; sleep 0.3; echo err >&2", "err", None),
    ("echo err >&2; sleep 0.3; echo out; exit 1", "out", "err"),
    ("echo loss 0.5; echo 'error: no such file'; exit 1", "error: no such file", "error: no such file"),
    (r"echo bad; printf ' 10%%|#   | 1/9\r 90%%|### | 8/9'; exit 1", "90%|### | 8/9", "bad"), ("true", None, None), ("exit 1", None, None),
    ("echo out; kill -SEGV $$", "out", None)]


def test_an_ended_job_keeps_its_last_line(home):
    ids = [add(home, command) for command, _, _ in LAST_LINES]
    again = add(home, "[ -e once ] || { touch once; echo first; exit 3; }", "--retries", "1", "--cwd", home.top)
    home.main("wait", *ids, again)
    for job_id, (command, line, cause) in zip(ids, LAST_LINES):
        job = home.job(job_id)
        assert (job["last_line"], job["attempts"][-1]["last_line"], job["cause_line"]) == (line, line, cause), command
    job = home.job(again)
    assert job["last_line"] is None and [one["last_line"] for one in job["attempts"]] == ["first", None], "each attempt its own"
    home.kill_service()
    home.start()
    assert home.job(ids[0])["last_line"] == "b"
    home.file("logs", f"job_{ids[0]}", "stdout.log").unlink()
    assert "Last lines\n  b\n" in home.main("show", ids[0]).out


def test_a_log_folder_that_was_removed_is_told(home):
    gone, kept = add_and_wait(home, "echo hello", "--group", "cleaned"), add_and_wait(home, "echo there", "--group", "cleaned")
    shutil.rmtree(home.job(gone)["log_dir"])
    says = f"the logs of job {gone} are gone: there is no {home.file('logs', f'job_{gone}')}"
    for options in ([], ["-f"], ["-n", "3"], ["--grep", "hello"], ["--stream", "stderr"]):
        done = home.main("logs", gone, *options)
        assert (done.code, done.out) == (3, "") and f"nexus: {says}\nhint: nexus show {gone} " in done.err, options
    for options in (["--group", "cleaned"], ["-f", "--group", "cleaned"], [kept, gone], [gone, kept, "--grep", "there"]):
        done = home.main("logs", *options)
        assert done.code == 3 and f"nexus: {says}\n" in done.err and f"{kept} | there\n" in done.out, options
    with pytest.raises(nexus.NexusError) as caught:
        list(home.client().logs(gone))
    assert caught.value.kind == "not_found" and caught.value.message == says
    assert home.main("logs", kept).code == 0
    done = home.main("show", gone)
    assert done.code == 0 and f"\n  {says}\n" in done.out


def test_a_log_folder_that_is_removed_while_it_is_followed_is_told(home):
    running, other = add(home, "echo hello; sleep 1000"), add(home, "echo there; sleep 1000")
    for job_id in (running, other):
        live.until(lambda job_id=job_id: "e" in home.main("logs", job_id).out)
    followers = [home.popen("logs", "-f", running), home.popen("logs", "-f", running, other)]
    for process in followers:
        process.stdout.readline()
    shutil.rmtree(home.job(running)["log_dir"])
    assert followers[0].wait(60) == 3 and b"are gone: there is no" in followers[0].stderr.read()
    home.main("kill", other)
    assert followers[1].wait(60) == 3 and b"are gone: there is no" in followers[1].stderr.read()
    home.main("kill", running)
    for process in followers:
        process.stdout.close()
        process.stderr.close()
