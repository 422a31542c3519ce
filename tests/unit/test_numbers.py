"""The numbers that the documents tell are those of the code: how long, how many, how large."""

import re

import pytest

import build
import nexus

MIB = 2**20
SET = nexus.Config()
NUMBERS = [  # document, a piece of a sentence, the numbers of the code that stand in it
    ("guide", "when more than {} MiB (`max_unseen_mem_mib`)", [SET.gpu.max_unseen_mem_mib]),
    ("guide", "runs a failed job again, up to three times, after {}, {} and {} seconds",
     [SET.jobs.retry_backoff_seconds * factor for factor in (1, 2, 4)]),
    ("guide", "`[jobs] queue_limit` ({:,})", [SET.jobs.queue_limit]),
    ("guide", "After `reserve_after_seconds` ({})", [SET.jobs.reserve_after_seconds]),
    ("guide", "shown as `idle` when all its GPUs have stayed below {:g} % for {:g} minutes", [nexus.IDLE_LOAD, SET.jobs.idle_minutes]),
    ("guide", "in a line of more than {:,} bytes", [nexus.MAX_BAR_BYTES]),
    ("guide", "After {} seconds (`kill_grace_seconds`), all that is left gets SIGKILL", [SET.jobs.kill_grace_seconds]),
    ("guide", "nexus reads it every {} seconds (`jobs_file_interval_seconds`)", [SET.jobs.jobs_file_interval_seconds]),
    ("guide", "is no regular file, or has more than {:g} MiB", [nexus.JOBS_FILE_BYTES / MIB]),
    ("http-api", "waits for a change, for {:g} s at most", [nexus.NEWS_TIMEOUT_S]),
    ("http-api", "an id, a name or a pattern of names has {} characters at most, `text=` {}", [nexus.MAX_NAME, nexus.MAX_SOUGHT]),
    ("http-api", "A request adds or names at most {:,} jobs. A job comes `after` at most {:,} others, and all of one user that wait "
     "together after {:,}", [nexus.MAX_JOBS, nexus.MAX_PARENTS, nexus.MAX_LINKS]),
    ("http-api", "`grep=` searches it, {:g} MiB in a reply", [nexus.MAX_SEARCH_BYTES / MIB]),
    ("http-api", "has room for [connections](security.md#what-users-with-a-token-share) that the others cannot take: {} at most",
     [nexus.MAX_USER_CONNECTIONS]),
    ("http-api", "A body has at most {:g} MiB with a user's token, {:g} MiB with yours",
     [nexus.MAX_USER_BODY_BYTES / MIB, nexus.MAX_BODY_BYTES / MIB]),
    ("http-api", "Above {:g} KiB, send the token as Authorization", [nexus.SMALL_FORM_BYTES / 1024]),
    ("http-api", "has the last {:g} MiB each of stdout and stderr", [nexus.MAX_RESULT_BYTES / MIB]),
    ("operations", "is passed over after {:g} s", [nexus.FOLDER_TIMEOUT_S]),
    ("operations", "`history_limit` ({})", [SET.state.history_limit]),
    ("operations", "what ran on them in the last {:g} days, {:,} attempts at most", [nexus.RUNS_S / 86400, nexus.MAX_RUNS]),
    ("operations", "after {} days for each month", [nexus.USAGE_DAYS]),
    ("operations", "A user's groups beyond {} a day count as `(other)`", [nexus.MAX_USAGE_GROUPS]),
    ("security", "Of these there are {}, for {:g} seconds each, and {:g} for the reply; a head has at most {:g} KiB",
     [nexus.MAX_UNKNOWN, nexus.UNKNOWN_TIMEOUT_S, nexus.REQUEST_TIMEOUT_S, nexus.MAX_HEAD_BYTES / 1024]),
    ("security", "who opens {} of them within a second", [nexus.MAX_UNKNOWN]),
    ("security", "One of more than {:g} KiB must come at {:g} KiB a second or more. Of these {} are read at once, {} from one place; "
     "others wait for {:g} seconds", [nexus.SMALL_FORM_BYTES / 1024, nexus.BODY_BYTES_PER_S / 1024, nexus.MAX_FORMS, nexus.MAX_BODIES,
                                      nexus.ROOM_WAIT_S]),
    ("security", "Output is taken from where the log ends here, into that job's log, at most {:g} MiB in a reply", [nexus.LOG_BYTES / MIB]),
    ("security", "Texts are one line and cut to {:,} characters, notes to the last {}", [nexus.MAX_WORDS, nexus.MAX_NOTES]),
    ("security", "A reply has at most {:g} MiB, half a million parts, {} GPUs and {:,} processes on them",
     [nexus.MAX_ANSWER_BYTES / MIB, nexus.MAX_NODE_GPUS, nexus.MAX_GPU_ROWS]),
    ("security", "is cut off at about {:g} MiB, and what git hears of refs there at {:g} MiB",
     [nexus.MAX_SAID_BYTES / MIB, nexus.MAX_REFS_BYTES / MIB]),
    ("security", "A node has at most {} jobs that it has not confirmed", [nexus.MAX_ORDERS]),
    ("security", "You have {} connections over TCP", [nexus.MAX_CONNECTIONS]),
    ("security", "Users with a token have {} together: each at most {}, and {} in any case",
     [nexus.MAX_CONNECTIONS, nexus.MAX_USER_CONNECTIONS, nexus.USER_ROOM]),
    ("security", "there is no room waits for {:g} seconds, then it gets 503. Of bodies of more than {:g} MiB, a user may send {} at once",
     [nexus.ROOM_WAIT_S, nexus.SMALL_BODY_BYTES / MIB, nexus.MAX_BODIES]),
    ("security", "Of each user's requests {} are worked out at once", [nexus.USER_TURNS]),
    ("security", "each looks less often, after {:g} seconds at the latest", [nexus.MAX_LOOK_PAUSE_S]),
    ("slurm", "`max_submitted` ({})", [SET.slurm.max_submitted]),
]
WORDS = [  # document, a piece of a sentence, whether the code is so
    ("guide", "but not in its first minute", nexus.PREEMPT_AFTER_S == 60),
    ("guide", "It is stopped after twice that time", SET.jobs.timeout_multiplier == 2),
    ("guide", "may have five times as many", nexus.USERS_SHARE == 5),
    ("guide", "If the first three jobs of a group all fail within seconds", nexus.GROUP_FAILURES == 3),
    ("guide", "in logs of any size, two at once: a third search waits", nexus.MAX_SEARCHES == 2),
    ("guide", "A job that has run for half a minute shows", nexus.PROGRESS_AFTER_S == 30),
    ("guide", "has waited or run for a minute, and again", nexus.GROUP_QUIET_S == 60),
    ("guide", "A hook may take a minute", nexus.HOOK_TIMEOUT_S == 60),
    ("http-api", "and about two million values", nexus.MAX_BODY_VALUES == 2 * 10**6),
    ("http-api", "all users but you together five times as many", nexus.USERS_SHARE == 5),
    ("operations", "means of a minute for a day, of ten minutes for 31 days", [
        (ring.step_s, ring.step_s * ring.count) for ring in (nexus.MINUTES, nexus.TENS)] == [(60, 86400), (600, 31 * 86400)]),
    ("operations", "for a year: what they used", nexus.USAGE_MONTHS_DAYS == 365),
    ("security", "half a million parts", nexus.MAX_ANSWER_FACTS == 500000),
    ("security", "look for it ten times a second", nexus.LOG_LOOK_S == 0.1),
    ("security", "together do so for a tenth of the time at most", nexus.LOOK_FACTOR == 10),
]


def read_document(name):
    return re.sub(r"\s+", " ", (build.TOP / f"docs/{name}.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("document, piece, numbers", NUMBERS, ids=[case[1][:50] for case in NUMBERS])
def test_a_number_is_the_one_of_the_code(document, piece, numbers):
    told = piece.format(*(int(number) if number == int(number) else number for number in numbers))
    assert told in read_document(document)


@pytest.mark.parametrize("document, piece, is_so", WORDS, ids=[case[1][:50] for case in WORDS])
def test_a_number_in_words_is_the_one_of_the_code(document, piece, is_so):
    assert piece in read_document(document) and is_so
