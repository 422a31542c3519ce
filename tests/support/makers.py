"""Values for tests: each maker fills in what a case does not care about."""

import pathlib

from hypothesis import strategies as st

import nexus

SUPPORT = pathlib.Path(__file__).resolve().parent
SAMPLES = SUPPORT.parent / "samples"
NOW = 1729783815.0                      # 2024-10-24T15:30:15Z
GB = 1024.0
CONFIG_KEYS = {key: name for name, table in nexus.SECTIONS.items() for key in table.FIELDS}      # {key: its section}


def job(id="abc", number=1, **fields):
    """A pending job for one GPU; `number` is its place in the line of its priority.

    What belongs to an attempt is its present one's: `attempt` is that one's number.
    """
    fields.setdefault("queue_key", (0, fields.get("priority", 1), number))
    present = {name: fields.pop(name) for name in list(fields) if name in nexus.ATTEMPT_FIELDS}
    if present or "attempt" in fields:
        present["number"] = fields.pop("attempt", len(fields.get("attempts", ())) + 1)
        fields["attempts"] = (*fields.get("attempts", ()), nexus.Attempt(**present))
    return nexus.Job(**{"id": id, "command": "python train.py", "cwd": "/home/ann", "user": "ann",
                        "created_at": NOW - 60, "number": number, "environment": "e" * 8, **fields})


def running(id="abc", indices=(0,), **fields):
    """A job that has run for a minute on the GPUs of these indices."""
    return job(id, **{"status": nexus.RUNNING, "gpus": len(indices), "gpu_indices": tuple(indices),
                      "gpu_uuids": tuple(f"GPU-{index}" for index in indices), "started_at": NOW - 60, **fields})


def finished(id="abc", **fields):
    return job(id, **{"status": nexus.COMPLETED, "exit_code": 0, "gpu_indices": (0,),
                      "gpu_uuids": ("GPU-0",), "started_at": NOW - 60, "finished_at": NOW, "runtime_seconds": 60.0,
                      **fields})


def gpu(index=0, **fields):
    """An idle RTX 3090."""
    return nexus.Gpu(**{"index": index, "uuid": f"GPU-{index}", "name": "RTX 3090", "memory_total_mib": 24 * GB,
                        "memory_used_mib": 0.0, "utilization": 0.0, **fields})


def mig_slice(number=0, gb=10, **fields):
    """An idle MIG slice of card 0."""
    profile = f"{gb // 10}g.{gb}gb"
    return gpu(**{"uuid": f"MIG-{number}", "name": f"A100 MIG {profile}", "is_mig": True, "slice": number, "profile": profile,
                  "memory_total_mib": gb * GB, "utilization": None, **fields})


def ours(job_id, gib, pid=77):
    """A process of a job, and the memory it has taken."""
    return nexus.GpuProcess(pid, gib * GB, job_id)


def foreign(pid=4242, **fields):
    """A process of somebody else's."""
    return nexus.GpuProcess(**{"pid": pid, "memory_mib": 16 * GB, "user": "bob", "name": "python", **fields})


def state(*jobs, groups=(), **facts):
    made = nexus.State()
    for one in jobs:
        put(made, nexus.Put("jobs", one.id, one))
    facts.setdefault("next_number", 1 + max((one.number for one in jobs), default=0))
    for one in groups:
        put(made, nexus.Put("groups", one.name, one))
    put(made, *facts_put(**facts))
    return made


def put(state, *changes):
    """Make changes in a State."""
    for change in changes:
        state.put(change)


def indexes_of(state):
    """All indexes of a State, copied: what may be compared with those of another time."""
    return {name: getattr(state, name).copy() for name in ("running", "pending", "dependents")}


def find_faults(schema, value):
    """What nexus finds wrong with a value; "" if nothing."""
    try:
        nexus.check(schema, value, "it")
    except nexus.NexusError as error:
        return error.message
    return ""


def paths_of(fact, path=()):
    """Where the parts of JSON stand."""
    yield path
    if isinstance(fact, (dict, list)):
        for key in fact if isinstance(fact, dict) else range(len(fact)):
            yield from paths_of(fact[key], (*path, key))


def put_at(fact, path, new):
    """The same JSON with another part."""
    if not path:
        return new
    made = fact.copy()
    made[path[0]] = put_at(fact[path[0]], path[1:], new)
    return made


def facts_put(**facts):
    return [nexus.Put("facts", name, fact) for name, fact in facts.items()]


def config(**keys):
    """The default configuration, with these keys changed, whatever their section."""
    mock_gpus, data = keys.pop("mock_gpus", None), {}
    for key, fact in keys.items():
        data.setdefault(CONFIG_KEYS[key], {})[key] = fact
    return nexus.replace(nexus.parse_config(data, "config.toml"), mock_gpus=mock_gpus)


# Strategies of hypothesis

# What may stand in a command or a file name: all of Unicode, and bytes that are none (surrogateescape).
texts = st.text(max_size=12) | st.sampled_from([
    "", " ", "a b", "a\nb\r\n", "\x1b[2J", "\x7f\x9b", "caf\udce9", "\udc80\udcff", "\x85\u2028", "\u202e", "²", "٣",
    "größe 数据 🚀", '"[]{},\\'])
passed_on = texts.map(lambda text: text.replace("\0", ""))      # a path, say
ids = st.text(nexus.ID_LETTERS, min_size=3, max_size=4)
times = st.floats(0, 4e9)
numbers = st.integers(-(2**53), 2**53)
queue_keys = st.tuples(st.integers(-5, 5), st.integers(-5, 50), st.integers(0, 50) | st.floats(0, 50))


def maybe(strategy):
    return st.none() | strategy


def tuples(strategy):
    return st.lists(strategy, max_size=4).map(tuple)


def make_whole(job):
    """With the fields that must go together doing so."""
    pending_dependencies = tuple(one for one in job.pending_dependencies if one != job.id)
    retried_as = job.retried_as if job.retried_as != job.id else None
    made = nexus.replace(job, pending_dependencies=pending_dependencies, retried_as=retried_as)
    if job.status == nexus.RUNNING and job.current.gpu_uuids:
        count = len(nexus.list_shares(job))
        return nexus.change_job(made, gpu_uuids=tuple(f"GPU-{index}" for index in range(count)), gpu_indices=tuple(range(count))).value
    return made


ATTEMPT_FIELDS = {
    "number": st.integers(0, 9), "node": texts, "gpu_indices": tuples(st.integers(0, 99)),
    "gpu_uuids": tuples(texts), "slurm_key": maybe(texts), "slurm_id": maybe(texts), "slurm_node": maybe(texts),
    "is_idle_told": st.booleans(), "nonce": maybe(passed_on), "boot_id": maybe(texts), "session": maybe(passed_on), "pid": maybe(numbers),
    "pid_started": maybe(numbers), "notes": tuples(texts), "started_at": maybe(times), "stop_cause": maybe(texts),
    "stop_by": maybe(texts), "stop_line": maybe(texts), "finished_at": maybe(times), "runtime_seconds": maybe(times),
    "exit_code": maybe(st.integers(0, 255)), "signal": maybe(st.integers(1, 64)), "cause": maybe(texts),
    "cause_line": maybe(texts), "peak_rss_mib": maybe(times), "cpu_seconds": maybe(times),
    "peak_gpu_mem_mib": maybe(times), "mean_gpu_util": maybe(times)}
attempts = st.fixed_dictionaries({}, optional=ATTEMPT_FIELDS).map(lambda fields: nexus.Attempt(**fields))
JOB_FIELDS = {
    "id": ids, "command": passed_on, "cwd": passed_on, "user": passed_on, "created_at": times, "queue_key": queue_keys,
    "environment": texts, "number": st.integers(0, 10**9),
    "gpus": st.integers(0, 16) | st.integers(1, 800).map(lambda cents: cents / 100),
    "gpu_ids": maybe(tuples(st.integers(0, 99) | st.sampled_from(["0.1", "1.6"]))), "gpu_mem_mib": maybe(st.integers(1, 10**6)),
    "gpu_type": maybe(texts), "group": maybe(texts),
    "after": tuples(ids), "after_any": tuples(ids), "begin_at": maybe(times), "is_held": st.booleans(),
    "pending_dependencies": tuples(ids).map(lambda found: tuple(dict.fromkeys(found))),
    "env_digest": maybe(texts), "conda": maybe(passed_on),
    "snapshot": maybe(passed_on), "snapshot_repo": maybe(passed_on), "code": maybe(passed_on), "labels": tuples(st.tuples(texts, texts)),
    "cuda_arg": st.booleans(), "retries": st.integers(0, 9),
    "timeout_seconds": maybe(times), "expected_time": maybe(times), "retry_at": maybe(times),
    "attempts": tuples(attempts),
    "retried_as": maybe(ids), "is_hook_due": st.booleans(),
    "only_node": maybe(texts), "excluded_nodes": tuples(st.tuples(texts, texts)),
    "log_base": st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)),
    "exclusive": st.booleans(),
    "priority": numbers, "name": maybe(texts), "key": maybe(texts), "tty": st.booleans(), "preemptible": st.booleans(),
    "after_process": maybe(st.tuples(st.integers(1, 99), st.integers(1, 10**9), texts)),
    "umask": maybe(st.integers(0, 0o777)), "warn": maybe(st.sampled_from(["USR1@2m", "INT@90s"])),
    "status": st.sampled_from(nexus.STATUSES),
    "status_history": tuples(st.tuples(st.sampled_from(nexus.STATUSES), times)),
    "log_dir": maybe(passed_on)}
jobs = st.fixed_dictionaries(
    {name: made for name, made in JOB_FIELDS.items() if name in nexus.Job.REQUIRED},
    optional={name: made for name, made in JOB_FIELDS.items() if name not in nexus.Job.REQUIRED},
).map(lambda fields: nexus.Job(**fields)).map(make_whole)
environments = st.dictionaries(texts, texts, max_size=4)
state_facts = {
    "paused": st.booleans(), "paused_gpus": tuples(texts), "pause_reasons": tuples(st.tuples(texts, texts)), "has_hook": st.booleans(),
    "next_number": st.integers(1, 2**53)}
groups = st.builds(nexus.Group, texts, st.integers(0, 99), maybe(texts))
nodes = st.builds(nexus.KnownNode, st.builds(nexus.NodeConfig, texts, texts, texts, st.integers(0, 65535)), st.booleans(), st.booleans())
changes = st.one_of(
    jobs.map(lambda one: nexus.Put("jobs", one.id, one)), st.builds(nexus.Put, st.just("jobs"), ids, st.none()),
    st.builds(nexus.Put, st.just("environments"), texts, environments),
    groups.map(lambda one: nexus.Put("groups", one.name, one)), st.builds(nexus.Put, st.just("nodes"), texts, nodes),
    st.builds(nexus.Put, st.just("seen"), texts, st.none() | st.integers(1, 9)),
    st.one_of(*(st.builds(nexus.Put, st.just("facts"), st.just(name), made) for name, made in state_facts.items())))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12)
