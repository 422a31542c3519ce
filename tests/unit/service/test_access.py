"""A user with a token changes nothing of others: by every call, with a sample of what its body may hold."""

import contextlib
import itertools
import json

import pytest
import samples
from makers import put
from stage import FORM_TYPE, Bench, make_form

import nexus

CHANGING = [route for route in nexus.ROUTES if route.method != "GET" and not route.pattern.startswith("/node/")]
STATUSES = ("pending", "running", "failed")


class Lab(Bench):
    """The owner, bob and ann have a job of each status, in a group with a limit of theirs; ann is the one who calls."""

    def __enter__(self):
        super().__enter__()
        self.service.disk.fdatasync = lambda handle: None       # no test looks at this disk
        self.bearers = {user: self.make_bearer(user) for user in ("bob", "ann")}
        self.jobs = {user: self.add_jobs(user) for user in (self.service.user, "bob", "ann")}
        self.others = [*self.jobs[self.service.user], *self.jobs["bob"]]
        self.begun = self.copy_tables()
        return self

    def copy_tables(self):
        return {name: dict(getattr(self.store.state, name)) for name in ("jobs", "groups")}

    def begin_anew(self):
        """Have the jobs and groups again that there were at first: these are values."""
        for name, rows in self.copy_tables().items():
            for key in {**rows, **self.begun[name]}:
                if rows.get(key) is not self.begun[name].get(key):
                    put(self.store.state, nexus.Put(name, key, self.begun[name].get(key)))

    def add_as(self, user, **job):
        status, answer = self.ask("POST", "/queue", {"command": "true", **job}, self.bearers.get(user))
        assert status == 200, answer
        return answer["id"]

    def add_jobs(self, user):
        ids = [self.add_as(user, name=f"{status}-of-{user}", group=f"group-of-{user}", max_concurrent=7) for status in STATUSES]
        for job_id, status in zip(ids[1:], STATUSES[1:]):
            self.become(job_id, status)
        return ids

    def words(self, user):
        """What a text may name of a user's: ids, names, a group, the user."""
        return [*self.jobs[user], *(f"{status}-of-{user}" for status in STATUSES), f"group-of-{user}", user]

    def look(self):
        """All that is not ann's: rows of State, and who is with them in a group or after them."""
        state = self.store.state
        groups = [f"group-of-{user}" for user in self.jobs if user != "ann"]
        with contextlib.suppress(OSError), open(self.layout.tokens_file) as file:
            tokens = file.read()
        return {"jobs": {id: job for id, job in state.jobs.items() if job.user != "ann"}, "tokens": tokens, "nodes": state.nodes,
                "groups": {name: (state.groups.get(name), [id for id, job in state.jobs.items() if job.group == name]) for name in groups},
                "dependents": [id for id, job in state.jobs.items() if not {*self.others}.isdisjoint((*job.after, *job.after_any))],
                "followers": [id for id, job in state.jobs.items() if not {*groups}.isdisjoint((*job.after_group, *job.after_any_group))],
                "facts": {name: getattr(state, name) for name in nexus.FACTS if name != "next_number"},
                "environments": {job.environment: state.environments[job.environment] for job in state.jobs.values()
                                 if job.user != "ann"}, "is_stopping": self.service.is_stopping}


@pytest.fixture(scope="module")
def shared_lab():
    with Lab() as made:
        yield made


@pytest.fixture
def lab(shared_lab):
    yield shared_lab
    shared_lab.begin_anew()


def list_samples(schema, words):
    """What may stand where this schema does: the words in each text, the ends of each range, every key of an object alone."""
    for one in schema.get("anyOf", [schema]):
        name = one.get("$ref", "").rpartition("/")[2]
        one = nexus.BODIES[name] if name else one
        if "anyOf" in one:
            yield from list_samples(one, words)
        yield from one.get("enum", one.get("examples", ()))
        kind = one.get("type")
        if kind == "string":
            yield from ("/tmp", "/") if one.get("pattern", "").startswith("^/") else words
        elif kind in ("integer", "number"):
            yield from (one[end] for end in ("minimum", "maximum") if end in one)
        elif kind == "boolean":
            yield from (True, False)
        elif kind == "array":
            yield from ([sample] for sample in list_samples(one["items"], words))
        elif kind == "object":
            needed = {"command": "true"} if "command" in one.get("properties", {}) and not one.get("minProperties") else {}
            for key, row in one.get("properties", {"WORD": one.get("additionalProperties", {})}).items():
                for sample in list_samples(row, words):
                    yield {**needed, key: sample}
                    if key in ("group", "status", "change", "signal") and "ids" in one.get("properties", {}):
                        yield from ({"ids": [word], key: sample} for word in words)
        elif kind == "null":
            yield None


def list_bodies(route, words):
    if route.body == "Form":
        for key, row in nexus.FORM_KEYS.items():
            for sample in list_samples(row.schema, words):
                if isinstance(sample, (str, int, float)):
                    yield make_form(f"token: {'secret-of-ann' if key != 'token' else sample}\n" + (
                        f"{key}: {json.dumps(sample)}\n" if key != "token" else ""))
    elif route.body:
        found = list_samples(nexus.BODIES[route.body], words)
        yield from {json.dumps(body, sort_keys=True): body for body in found}.values()
    else:
        yield None


def call(lab, route, path, body):
    lab.begin_anew()
    headers = {**lab.bearers["ann"], **(FORM_TYPE if route.body == "Form" else {})}
    status, answer = lab.ask(route.method, path, body, headers, uid=4242)
    assert status < 500, (route.pattern, path, body, answer)
    return status


def targets(route, words):
    """The paths of a call, for each of these words."""
    path = route.pattern.replace("{index}", "0").replace("{name}", "n1")
    return [path.replace("{id}", word) for word in words] if "{id}" in path else [path]


@pytest.mark.parametrize("route", CHANGING, ids=[f"{route.method} {route.pattern}" for route in CHANGING])
def test_nothing_of_others_is_changed(lab, route, monkeypatch):
    """Theirs is named in the path, in the body, or in both."""
    monkeypatch.setattr(lab.service.pool, "add_node", lambda *_: pytest.fail("a machine was added"))
    monkeypatch.setattr(lab.service.clock, "sleep", lambda _: None)         # after a wrong token
    monkeypatch.setattr(nexus, "CANCEL_TIMEOUT_S", 0.0)                     # for the end, which does not come
    for user in (lab.service.user, "bob"):
        before, words = lab.look(), lab.words(user)
        bodies = samples.choose(list_bodies(route, words), 60)
        for path in targets(route, [*lab.jobs[user], f"pending-of-{user}"]):
            accepted = {call(lab, route, path, body) for body in bodies} - {400}
            if "{id}" in route.pattern or route.access == "owner":
                assert accepted and accepted <= {403, 404}, (path, accepted)
            assert lab.look() == before, path
        if "{id}" in route.pattern:
            for body in bodies:
                for path in targets(route, lab.jobs["ann"]):
                    call(lab, route, path, body)
                    assert lab.look() == before, (path, body)


@pytest.mark.parametrize("name", nexus.EDIT_KEYS)
def test_each_change_of_anothers_job_is_refused(lab, name):
    """Of each key there is a change that its schema allows, and it is not enough that it is malformed."""
    before = lab.look()
    for user in (lab.service.user, "bob"):
        samples = list(list_samples(nexus.EDIT["properties"][name], lab.words("ann")))
        for job_id, sample in itertools.product(lab.jobs[user], samples):
            status, answer = lab.ask("PATCH", f"/queue/{job_id}", {name: sample}, lab.bearers["ann"])
            assert status in (400, 403), answer
            if status == 403:
                assert answer["message"] == f"job {job_id} is {user}'s"
                break
        else:
            raise AssertionError(f"no sample of {name} is allowed: {samples}")
    assert lab.look() == before


INTO_A_GROUP = [  # reason, which of ann's jobs, (method, path, body), status
    ("a new job", None, lambda id, group: ("POST", "/queue", {"command": "true", "group": group}), 403),
    ("a new job, with its limit", None,
     lambda id, group: ("POST", "/queue", {"command": "true", "group": group, "max_concurrent": 1}), 403),
    ("the last of a list", None, lambda id, group: ("POST", "/queue", [{"command": "true"}, {"command": "true", "group": group}]), 403),
    ("one that waits", 0, lambda id, group: ("PATCH", f"/queue/{id}", {"group": group}), 403),
    ("one that runs", 1, lambda id, group: ("PATCH", f"/queue/{id}", {"group": group}), 403),
    ("one that runs, with another change", 1, lambda id, group: ("PATCH", f"/queue/{id}", {"group": group, "name": "n"}), 403),
    ("one that has ended", 2, lambda id, group: ("PATCH", f"/queue/{id}", {"group": group}), 409),
    ("a new group", 1, lambda id, group: ("PATCH", f"/queue/{id}", {"group": "anns-other"}), 200),
    ("out of the group", 1, lambda id, group: ("PATCH", f"/queue/{id}", {"group": None}), 200),
]


@pytest.mark.parametrize("reason, which, make_request, status", INTO_A_GROUP, ids=[case[0] for case in INTO_A_GROUP])
def test_the_group_of_another_takes_no_job(lab, reason, which, make_request, status):
    for user in (lab.service.user, "bob"):
        before = lab.look()
        job_id = lab.jobs["ann"][which or 0]
        assert lab.ask(*make_request(job_id, f"group-of-{user}"), lab.bearers["ann"])[0] == status
        assert lab.look() == before
        assert status == 200 or lab.store.state.jobs[job_id].group == "group-of-ann"


def test_a_retry_is_a_new_job_of_its_group(lab):
    """The owner has put a job into her group: she adds no more to it, by whichever way."""
    lab.add_as(lab.service.user, group="group-of-ann")
    for request in (("POST", "/queue", {"command": "true", "group": "group-of-ann"}),
                    ("POST", "/jobs/retry", {"ids": [lab.jobs["ann"][2]]})):
        status, answer = lab.ask(*request, lab.bearers["ann"])
        assert status == 403 and f"is {lab.service.user}'s" in answer["message"]
    assert lab.ask("POST", "/jobs/retry", {"ids": [lab.jobs["ann"][2]]})[0] == 200, "the owner may"


def test_the_owner_may_do_it(lab):
    assert lab.ask("PATCH", f"/queue/{lab.jobs['ann'][0]}", {"group": "group-of-bob"})[0] == 200


def test_variables_are_refused_in_a_change_too():
    with Bench(allowed_script_paths=["/srv"]) as bench:
        bearer = bench.make_bearer("ann")
        job_id = bench.ask("POST", "/queue", {"command": "python /srv/a.py", "cwd": "/srv"}, bearer)[1]["id"]
        for headers, status in ((bearer, 403), ({}, 200)):
            assert bench.ask("PATCH", f"/queue/{job_id}", {"env": {"PYTHONPATH": "/tmp"}}, headers)[0] == status
