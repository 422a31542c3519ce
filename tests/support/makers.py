"""Values for tests: each maker fills in what a case does not care about.

    made = nexus.plan(state(job("abc", gpus=2), running("xyz", [0])), [gpu(0), gpu(1)], None, config(), NOW)

`values(nexus.Job)` is a strategy of hypothesis: whatever a value of that class may hold.
"""

import pathlib

from hypothesis import strategies as st

import nexus

SUPPORT = pathlib.Path(__file__).resolve().parent
SAMPLES = SUPPORT.parent / "samples"
NOW = 1729783815.0                      # 2024-10-24T15:30:15Z
GB = 1024.0
MINUTE = NOW // 60 * 60
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


def means(at=MINUTE, count=1, **facts):
    return nexus.GpuMeans(at, count, **facts)


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
    lists = {name: {key: items.copy() for key, items in getattr(state, name).items()} for name in nexus.INDEXES}
    return {"running": state.running.copy(), "pending": state.pending.copy(), "live": state.live.copy(), **lists}


def check_indexes(made):
    """That every index of State says what its jobs say."""
    pending = {one.id: one for one in made.jobs.values() if one.status in (nexus.PENDING, nexus.SUBMITTED)}
    ordered = nexus.list_pending(made)
    assert {one.id: one for one in ordered} == pending and len(ordered) == len(pending)
    assert made.pending == pending
    queue = nexus.PendingQueue(made)
    assert [queue.find_position(one) for one in ordered] == list(range(len(ordered)))
    by_class, dependents, named, members, queued, queued_in, prioritized, ended_by, ended_in = ({} for _ in range(9))
    awaited_names, followers, awaited, lost = ({} for _ in range(4))
    for one in made.jobs.values():
        if one.status in nexus.FINAL:
            item = one.status_history[-1][1] if one.status_history else 0.0, one.number, one.id
            ended_by.setdefault(one.status, []).append(item)
            ended_in.setdefault((one.user, one.group or ""), []).append(item)
        for user in (None, one.user) if one.name else ():
            named.setdefault((user, one.name), []).append((one.number, one.id))
            if one.status not in nexus.FINAL:
                awaited_names.setdefault((user, one.name), []).append((one.number, one.id))
        for group in {one.group, *one.retried_groups} - {None}:
            if one.status not in nexus.FINAL:
                awaited.setdefault(group, []).append((one.number, one.id))
            elif one.status != nexus.COMPLETED and one.retried_as is None:
                lost.setdefault(group, []).append(one.id)
        if one.group:
            members.setdefault(one.group, []).append((one.user, one.id))
    for one in pending.values():
        place = one.preemptible, *one.queue_key, one.id, one.gpus or 0.01
        queued.setdefault(one.user, []).append(place)
        queued_in.setdefault((one.user, one.group or ""), []).append(place)
        prioritized.setdefault("high" if one.priority < 1 else "low" if one.priority > 1 else "normal", []).append(one.id)
        if not one.is_held and not one.pending_dependencies and not one.pending_groups and one.status == nexus.PENDING:
            by_class.setdefault(nexus.find_class(one), []).append((one.queue_key, one.id))
        for parent in one.pending_dependencies:
            dependents.setdefault(parent, []).append(one.id)
        groups = one.pending_groups if one.attempts else (*one.after_group, *one.after_any_group)
        for group in {*groups} if one.status == nexus.PENDING else ():
            followers.setdefault(group, []).append(one.id)
    for index, wanted in ((made.ready, by_class), (made.dependents, dependents), (made.named, named), (made.members, members),
                          (made.queued, queued), (made.queued_in, queued_in), (made.prioritized, prioritized),
                          (made.ended, ended_by), (made.ended_in, ended_in), (made.awaited_names, awaited_names),
                          (made.followers, followers), (made.awaited, awaited), (made.lost, lost)):
        assert index == {key: sorted(items) for key, items in wanted.items()}
    assert made.running == {id: one for id, one in made.jobs.items() if one.status == nexus.RUNNING}
    assert made.live == {id: one for id, one in made.jobs.items() if one.status in (nexus.RUNNING, nexus.SUBMITTED)}
    ended = {id: one for id, one in made.jobs.items() if one.status in nexus.FINAL}
    assert {one.id: one for one in nexus.list_finished(made)} == ended
    assert all(id == one.id for id, one in made.jobs.items())
    assert all(one.number < made.next_number for one in made.jobs.values())


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
    keys.setdefault("cpu_slots", 4)                 # as on a machine with four cores
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
    is_there = any(one.slurm_key is not None and one.finished_at is None for one in made.attempts[-1:])     # in Slurm's queue
    return nexus.replace(made, status=nexus.SUBMITTED) if made.status == nexus.PENDING and is_there else made


def of_row(row):
    """What fits a row of nexus.FACT_KINDS, as it is after it was read."""
    schema = row.schema
    if "minimum" in schema:
        whole = st.integers(max(schema["minimum"], -(2**53)), min(schema["maximum"], 2**53))
        return whole if schema["type"] == "integer" else whole.map(float) | st.floats(max(0, schema["minimum"]), 4e9)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    return st.from_regex(schema["pattern"], fullmatch=True) if "pattern" in schema else texts.map(row.convert)


KINDS = {"str": passed_on, "int": numbers, "float": times, "bool": st.booleans(),
         **{name: of_row(row) for name, row in nexus.FACT_KINDS.items()}}


def of_kind(kind):
    """What a field may hold whose annotation says so: `tuple[int, ...] | None`."""
    if kind.endswith(" | None"):
        return st.none() | of_kind(kind[:-len(" | None")])
    outer, _, inner = kind.partition("[")
    if outer == "tuple":
        inner = inner[:-1]
        return tuples(of_kind(inner[:-len(", ...")])) if inner.endswith(", ...") else st.tuples(*map(of_kind, inner.split(", ")))
    return KINDS[outer] if outer in KINDS else values(getattr(nexus, outer))


def values(cls, **chosen):
    """Values of a class: of some fields what is chosen for them, of the others whatever they may hold."""
    made = {name: chosen[name] if name in chosen else of_kind(kind) for name, kind in cls.__annotations__.items()}
    required = {name: made.pop(name) for name in sorted(cls.REQUIRED)}
    return st.fixed_dictionaries(required, optional=made).map(lambda fields: cls(**fields))


jobs = values(
    nexus.Job, id=ids, queue_key=queue_keys, gpus=st.integers(0, 16) | st.integers(1, 800).map(lambda cents: cents / 100),
    gpu_ids=st.none() | tuples(st.integers(0, 99) | st.sampled_from(["0.1", "1.6"])), retried_as=st.none() | ids,
    pending_dependencies=tuples(ids).map(lambda found: tuple(dict.fromkeys(found))),
    warn=st.none() | st.sampled_from(["USR1@2m", "INT@90s"]), status=st.sampled_from(nexus.STATUSES),
    status_history=tuples(st.tuples(st.sampled_from(nexus.STATUSES), times)),
    attempts=tuples(values(nexus.Attempt, number=st.integers(0, 9), gpu_indices=tuples(st.integers(0, 99)),
                           exit_code=st.none() | st.integers(0, 255), signal=st.none() | st.integers(1, 64)))).map(make_whole)
environments = st.dictionaries(texts, texts, max_size=4)
state_facts = {
    "paused": st.booleans(), "paused_gpus": tuples(texts), "pause_reasons": tuples(st.tuples(texts, texts)), "has_hook": st.booleans(),
    "has_group_hook": st.booleans(),
    "next_number": st.integers(1, 2**53)}
groups = st.builds(nexus.Group, texts, st.integers(0, 99), st.none() | texts)
nodes = st.builds(nexus.KnownNode, st.builds(nexus.NodeConfig, texts, texts, texts, st.integers(0, 65535)), st.booleans(), st.booleans())
changes = st.one_of(
    jobs.map(lambda one: nexus.Put("jobs", one.id, one)), st.builds(nexus.Put, st.just("jobs"), ids, st.none()),
    st.builds(nexus.Put, st.just("environments"), texts, environments),
    groups.map(lambda one: nexus.Put("groups", one.name, one)), nodes.map(lambda one: nexus.Put("nodes", one.config.name, one)),
    st.builds(nexus.Put, st.just("seen"), texts, st.none() | st.integers(1, 9)),
    st.one_of(*(st.builds(nexus.Put, st.just("facts"), st.just(name), made) for name, made in state_facts.items())))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12)
