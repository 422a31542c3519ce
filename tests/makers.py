"""Values for tests: each maker fills in what a case does not care about."""

import pathlib

from hypothesis import strategies as st

import nexus

TESTS = pathlib.Path(__file__).parent
SAMPLES = TESTS / "samples"
NOW = 1729783815.0                      # 2024-10-24T15:30:15Z
GB = 1024.0


def job(id="abc", number=1, **fields):
    """A pending job for one GPU; `number` is its place in the line of its priority."""
    fields.setdefault("order", (0, fields.get("priority", 1), number))
    return nexus.Job(**{"id": id, "command": "python train.py", "cwd": "/home/ann", "user": "ann",
                        "created_at": NOW - 60, "number": number, "environment": "e" * 8,
                        "content": "c" * 8, **fields})


def running(id="abc", indices=(0,), **fields):
    """A job that has run for a minute on the GPUs of these indices."""
    return job(id, **{"status": nexus.RUNNING, "gpus": len(indices), "gpu_indices": tuple(indices), "attempt": 1,
                      "gpu_uuids": tuple(f"GPU-{index}" for index in indices), "started_at": NOW - 60, **fields})


def finished(id="abc", **fields):
    return job(id, **{"status": nexus.COMPLETED, "exit_code": 0, "attempt": 1, "gpu_indices": (0,),
                      "gpu_uuids": ("GPU-0",), "started_at": NOW - 60, "finished_at": NOW, "runtime_seconds": 60.0,
                      **fields})


def gpu(index=0, **fields):
    """An idle RTX 3090."""
    return nexus.Gpu(**{"index": index, "uuid": f"GPU-{index}", "name": "RTX 3090", "memory_total_mib": 24 * GB,
                        "memory_used_mib": 0.0, "utilization": 0.0, **fields})


def ours(job_id, gib, pid=77):
    """A process of a job, and the memory it has taken."""
    return nexus.GpuProcess(pid, gib * GB, job_id)


def foreign(pid=4242, **fields):
    """A process of somebody else's."""
    return nexus.GpuProcess(**{"pid": pid, "memory_mib": 16 * GB, "user": "bob", "name": "python", **fields})


def state(*jobs, groups=(), **facts):
    made = nexus.State()
    for one in jobs:
        nexus.apply(made, nexus.JobAdded(one))
    for one in groups:
        nexus.apply(made, nexus.GroupChanged(one))
    if facts:
        nexus.apply(made, nexus.StateChanged(facts))
    return made


def config(**keys):
    """The default configuration, with these keys changed, whatever their section."""
    data = {}
    for setting in nexus.SETTINGS:
        if setting.key in keys:
            data.setdefault(setting.section, {})[setting.key] = keys.pop(setting.key)
    assert not keys, f"no such key: {keys}"
    return nexus.parse_config(data, "config.toml")


# Strategies of hypothesis

# What may stand in a command or a file name: all of Unicode, and bytes that are none (surrogateescape).
texts = st.text(max_size=12) | st.sampled_from([
    "", " ", "a b", "a\nb\r\n", "\x1b[2J", "\x7f\x9b", "caf\udce9", "\udc80\udcff", "\x85\u2028", "\u202e", "²", "٣",
    "größe 数据 🚀", '"[]{},\\'])
ids = st.text(nexus.ID_LETTERS, min_size=3, max_size=4)
times = st.floats(0, 4e9)
numbers = st.integers(-(2**53), 2**53)
orders = st.lists(st.integers(-5, 50), min_size=3, max_size=6).map(tuple)


def maybe(strategy):
    return st.none() | strategy


def tuples(strategy):
    return st.lists(strategy, max_size=4).map(tuple)


JOB_FIELDS = {
    "id": ids, "command": texts, "cwd": texts, "user": texts, "created_at": times, "order": orders,
    "environment": texts, "content": texts, "number": st.integers(0, 10**9),
    "gpus": st.integers(0, 16) | st.integers(1, 800).map(lambda cents: cents / 100),
    "gpu_ids": maybe(tuples(st.integers(0, 99))), "gpu_mem_mib": maybe(st.integers(1, 10**6)), "group": maybe(texts),
    "after": tuples(ids), "unmet": tuples(ids).map(lambda found: tuple(dict.fromkeys(found))), "env_digest": maybe(texts),
    "conda": maybe(texts),
    "snapshot": maybe(texts), "snapshot_repo": maybe(texts), "code": maybe(texts), "labels": tuples(st.tuples(texts, texts)),
    "cuda_arg": st.booleans(), "retries": st.integers(0, 9),
    "timeout_seconds": maybe(times), "expected_time": maybe(times), "launch_failures": st.integers(0, 9), "retry_at": maybe(times),
    "attempts": tuples(st.tuples(st.integers(1, 9), times, times, times, maybe(st.integers(0, 255)), texts, tuples(st.integers(0, 99)))),
    "retried_as": maybe(ids), "is_told": st.booleans(),
    "only_node": maybe(texts), "unfit": tuples(st.tuples(texts, texts)), "node": texts, "remote_id": maybe(ids),
    "log_base": st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)), "head": maybe(texts), "head_attempt": st.integers(0, 9),
    "is_collected": st.booleans(),
    "is_alone": st.booleans(), "log_offset": st.integers(0, 10**9), "stop_line": maybe(texts), "mean_gpu_util": maybe(times),
    "priority": numbers, "name": maybe(texts), "key": maybe(texts), "tty": st.booleans(),
    "umask": maybe(st.integers(0, 0o777)),
    "limits": tuples(st.tuples(texts, numbers, numbers)), "status": st.sampled_from(nexus.STATUSES),
    "status_history": tuples(st.tuples(st.sampled_from(nexus.STATUSES), times)), "passed_over_at": maybe(times),
    "attempt": st.integers(0, 9), "gpu_indices": tuples(st.integers(0, 99)), "gpu_uuids": tuples(texts),
    "nonce": maybe(texts), "boot_id": maybe(texts), "log_dir": maybe(texts), "session": maybe(texts),
    "pid": maybe(numbers), "pid_started": maybe(numbers), "started_at": maybe(times), "finished_at": maybe(times),
    "runtime_seconds": maybe(times),
    "exit_code": maybe(st.integers(0, 255)), "signal": maybe(st.integers(1, 64)), "cause": maybe(texts),
    "cause_line": maybe(texts), "stop_cause": maybe(texts), "stop_by": maybe(texts), "notes": tuples(texts),
    "peak_rss_mib": maybe(times), "cpu_seconds": maybe(times), "peak_gpu_mem_mib": maybe(times)}
jobs = st.fixed_dictionaries(
    {name: made for name, made in JOB_FIELDS.items() if name not in nexus.Job.DEFAULTS},
    optional={name: made for name, made in JOB_FIELDS.items() if name in nexus.Job.DEFAULTS},
).map(lambda fields: nexus.Job(**fields))
environments = st.dictionaries(texts, texts, max_size=4)
state_facts = {
    "paused": st.booleans(), "paused_gpus": tuples(texts), "pause_reasons": tuples(st.tuples(texts, texts)), "hooks_since": maybe(times),
    "inventory": tuples(st.tuples(st.integers(0, 99), texts, texts, maybe(times))),
    "nodes": tuples(st.tuples(texts, texts, texts, st.integers(0, 65535), texts, texts, st.booleans()))}
groups = st.builds(nexus.Group, texts, st.integers(0, 99), maybe(texts), st.integers(-1, 3))
changes = st.one_of(
    st.builds(nexus.JobAdded, jobs),
    st.builds(nexus.JobChanged, ids, st.fixed_dictionaries({}, optional=JOB_FIELDS)),
    st.builds(nexus.JobsRemoved, tuples(ids)),
    st.builds(nexus.EnvironmentAdded, texts, environments),
    st.builds(nexus.GroupChanged, groups),
    st.builds(nexus.LineSeen, texts, st.integers(0, 9)),
    st.builds(nexus.StateChanged, st.fixed_dictionaries({}, optional=state_facts)))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12)
