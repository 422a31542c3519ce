"""What /proc tells of a process."""

import pytest

import nexus

PROC_STATS = [  # reason, text, process
    ("a name that looks like the rest",
     "8857 (a) R 1 (b c) S 8816 8816 7030 0 -1 4194304 147 0 0 0 0 0 0 0 20 0 1 0 267402 2990080 426 "
     "18446744073709551615 94629136044032 94629136061961 140721545151808 0 0 0 0 6 0 1 0 0 17 1 0 0 0 0 0 "
     "94629136076048 94629136077312 94629341863936 140721545157305 140721545157324 140721545157325 140721545158631 0\n",
     nexus.Process(8857, 267402, 8816, 7030, "S", 140721545157325, name="a) R 1 (b c")),
    ("ended, not yet waited for, and nobody else's business",
     "9 (x) Z 1 9 9 0 -1 4227084 103 0 0 0 0 0 0 0 20 0 1 0 5 0 0 "
     "18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n",
     nexus.Process(9, 5, 1, 9, "Z", 0, name="x")),
    ("a thread of the kernel's",
     "71 (kworker/1:2-events) I 2 0 0 0 -1 69238880 0 0 0 0 0 0 0 0 20 0 1 0 100 0 0 "
     "18446744073709551615 0 0 0 0 0 0 0 2147483647 0 1 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n",
     nexus.Process(71, 100, 2, 0, "I", 0, is_kernel=True, name="kworker/1:2-events")),
]


@pytest.mark.parametrize("reason, text, process", PROC_STATS, ids=[case[0] for case in PROC_STATS])
def test_parse_proc_stat(reason, text, process):
    assert nexus.parse_proc_stat(text) == process, reason


OOM_FILES = [  # reason, /proc/self/cgroup, the first files that are looked at
    ("version 2", "0::/user.slice/session-2.scope\n", ["/sys/fs/cgroup/user.slice/session-2.scope/memory.events"]),
    ("a container", "0::/\n", ["/sys/fs/cgroup/memory.events"]),
    ("version 1", "4:memory:/a:b\n2:cpu,cpuacct:/\n0::/x\n",
     ["/sys/fs/cgroup/x/memory.events", "/sys/fs/cgroup/memory/a:b/memory.oom_control"]),
    ("none", "", ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]),
]


@pytest.mark.parametrize("reason, text, first", OOM_FILES, ids=[case[0] for case in OOM_FILES])
def test_list_oom_files(reason, text, first):
    assert nexus.list_oom_files(text)[:len(first)] == first
