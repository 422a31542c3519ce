"""Whose a request is, where the kernel or a header decides: server/gate and machine/peers."""

import os
import socket
import types

import pytest

import nexus

OURS = {"host": "127.0.0.1:6234"}


def make_gate(**keys):
    """A Gate before a service that has nothing but its configuration."""
    config = nexus.parse_config({"service": keys}, "")
    return nexus.Gate(types.SimpleNamespace(config=config, user="ann", owner=nexus.Identity("ann", "ann"), node="gpu1",
                                            layout=types.SimpleNamespace(token_file="token")), "t" * 20)


def make_request(method="GET", uid=None, **headers):
    return nexus.Request(method, "/queue", {}, {**OURS, **headers}, bytes, "127.0.0.1", os.geteuid() if uid is None else uid, 0)


@pytest.mark.parametrize("header", [
    "forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-anything", "client-ip", "x-client-ip",
    "true-client-ip", "x-real-ip", "x-cluster-client-ip", "fly-client-ip", "cf-connecting-ip", "x-forward-for", "x-original-forwarded-for",
    "tailscale-user-login"])
def test_a_request_that_came_through_a_proxy_needs_a_token(header):
    assert make_gate().find_caller(make_request()).is_owner
    with pytest.raises(nexus.NexusError) as caught:
        make_gate().find_caller(make_request(**{header: "192.0.2.7"}))
    assert caught.value.kind == "unauthorized" and header in caught.value.message


def fetched(site, mode, dest):
    """What a browser says of a request."""
    return {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest}


SITES = [  # reason, method, headers, whether it may come from a browser
    ("nothing is said", "POST", {}, True),
    ("our page", "POST", {"origin": "http://127.0.0.1:6234", "sec-fetch-site": "same-origin"}, True),
    ("another site", "POST", {"origin": "http://evil.example"}, False),
    ("another port", "GET", {"origin": "http://127.0.0.1:8888"}, False),
    ("a page of another site, which only its address tells", "POST", {"referer": "http://evil.example/127.0.0.1:6234/"}, False),
    ("our page, which only its address tells", "POST", {"referer": "http://127.0.0.1:6234/#/jobs/abc"}, True),
    ("a picture in another site's page", "GET", fetched("cross-site", "no-cors", "image"), False),
    ("one under another name of this machine", "GET", fetched("same-site", "cors", "empty"), False),
    ("a link to us", "GET", fetched("cross-site", "navigate", "document"), True),
    ("a link that changes something", "POST", fetched("cross-site", "navigate", "document"), False),
    ("a frame in another site's page", "GET", fetched("cross-site", "navigate", "iframe"), False),
]


@pytest.mark.parametrize("reason, method, headers, may_come", SITES, ids=[case[0] for case in SITES])
def test_what_another_sites_page_sends_is_refused(reason, method, headers, may_come):
    request = make_request(method, **headers)
    if may_come:
        make_gate().check_site(request)
    else:
        with pytest.raises(nexus.NexusError) as caught:
            make_gate().check_site(request)
        assert caught.value.kind == "forbidden", reason


# By the kernel

def test_where_the_kernel_cannot_say_whose_a_connection_is_it_is_nobodys(monkeypatch):
    """As in sandboxes without sock_diag: such a request needs a token."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        real = socket.socket

        def refuse(family=-1, *rest, **more):
            if family == socket.AF_NETLINK:
                raise PermissionError(1, "Operation not permitted")
            return real(family, *rest, **more)

        monkeypatch.setattr(socket, "socket", refuse)
        assert nexus.find_socket_uid(client.getsockname(), client.getpeername()) is None


@pytest.mark.parametrize("address, plain", [("::ffff:127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("192.0.2.7", "192.0.2.7")])
def test_an_ipv4_address_is_one_also_where_an_ipv6_socket_tells_it(address, plain):
    assert nexus.unmap((address, 1)) == (plain, 1)


@pytest.mark.parametrize("address, is_this_machine", [
    ("localhost", True), ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("0.0.0.0", False), ("192.0.2.7", False), ("::", False)])
def test_which_addresses_are_of_this_machine_alone(address, is_this_machine):
    assert nexus.is_loopback(address) == is_this_machine


# How many connections there may be, and whose place is taken

class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Lines:
    """Connections, made by name; one that was closed is in none of the tables."""

    def __init__(self):
        self.clock, self.sockets = Clock(), {}
        self.table = nexus.Connections(self.clock)

    def open(self, name, source):
        self.sockets[name] = socket.socket()
        return self.table.admit(self.sockets[name], source)

    def take(self, name, user):
        """Whether one of nobody's becomes this user's ("": the owner's)."""
        self.open(name, "127.0.0.1")
        return self.table.take_room(self.sockets[name], user)

    def list_unknown(self):
        return [name for name, each in self.sockets.items() if each in self.table.unknown]


@pytest.fixture
def lines(monkeypatch):
    for name, number in (("MAX_UNKNOWN", 4), ("MAX_CONNECTIONS", 6), ("MAX_USER_CONNECTIONS", 4), ("USER_ROOM", 2)):
        monkeypatch.setattr(nexus, name, number)
    made = Lines()
    yield made
    for each in made.sockets.values():
        each.close()


def test_the_oldest_from_where_most_come_gives_way(lines):
    for name, source in (("b1", "uid bob"), ("a1", "uid ann"), ("b2", "uid bob"), ("b3", "uid bob")):
        assert lines.open(name, source)
    assert lines.open("a2", "uid ann") and lines.list_unknown() == ["a1", "b2", "b3", "a2"]
    lines.clock.now += nexus.LEAST_TIME_S + 1
    assert lines.open("c1", "192.0.2.7") and lines.list_unknown() == ["b2", "b3", "a2", "c1"], "of equals the older"


def test_who_opens_as_many_as_there_are_within_a_second_gets_no_more(lines):
    for name in ("b1", "b2", "b3", "b4"):
        assert lines.open(name, "uid bob")
    assert not lines.open("b5", "uid bob") and lines.list_unknown() == ["b1", "b2", "b3", "b4"]
    assert lines.open("a1", "uid ann") and lines.list_unknown() == ["b2", "b3", "b4", "a1"], "another one does"
    lines.clock.now += nexus.LEAST_TIME_S + 1
    assert lines.open("b6", "uid bob") and lines.list_unknown() == ["b3", "b4", "a1", "b6"]


def test_a_connection_that_does_not_show_whose_it_is_ends(lines):
    lines.open("b1", "uid bob")
    lines.clock.now += nexus.UNKNOWN_TIMEOUT_S
    lines.open("b2", "uid bob")
    lines.table.close_overdue()
    assert lines.list_unknown() == ["b1", "b2"]
    lines.clock.now += 1
    lines.table.close_overdue()
    assert lines.list_unknown() == ["b2"]


def test_each_user_has_room_and_the_owner_has_its_own(lines):
    assert [lines.take(f"b{number}", "bob") for number in range(5)] == [True] * 4 + [False], "at most so many of one"
    assert [lines.take(f"a{number}", "ann") for number in range(3)] == [True, True, False], "all of the users' are taken"
    assert [lines.take(f"c{number}", "cid") for number in range(3)] == [True, True, False], "but each has some in any case"
    assert [lines.take(f"o{number}", "") for number in range(7)] == [True] * 6 + [False]


BODIES = [  # reason, user ("": nobody yet), bytes, how many more may come at once
    ("large ones of a user", "bob", 2**20 + 1, 4), ("small ones of a user", "bob", 2**20, 9), ("the owner's", None, 2**26, 9),
    ("large forms of nobody, from one place", "", 65537, 4), ("small ones of nobody", "", 65536, 9)]


@pytest.mark.parametrize("reason, user, size, most", BODIES, ids=[case[0] for case in BODIES])
def test_so_many_large_bodies_may_come_at_once(lines, monkeypatch, reason, user, size, most):
    for name in ("MAX_UNKNOWN", "MAX_CONNECTIONS", "MAX_USER_CONNECTIONS"):
        monkeypatch.setattr(nexus, name, 99)
    for number in range(9):
        if user == "":
            lines.open(number, "uid eve")
        else:
            lines.take(number, user or "")
    assert sum(lines.table.take_body(lines.sockets[number], size) for number in range(9)) == most, reason


def test_of_large_forms_of_nobody_eight_are_read_at_once(lines, monkeypatch):
    monkeypatch.setattr(nexus, "MAX_UNKNOWN", 99)
    for number in range(12):
        lines.open(number, f"192.0.2.{number // 3}")
    assert sum(lines.table.take_body(lines.sockets[number], 65537) for number in range(12)) == nexus.MAX_FORMS == 8


# How much at once

def test_two_search_in_logs_at_once_and_a_third_is_told_to_wait():
    limit, searches = nexus.SearchLimit(), [object() for _ in range(3)]
    limit.begin(searches[0])
    limit.begin(searches[1])
    with pytest.raises(nexus.NexusError) as caught:
        limit.begin(searches[2])
    assert caught.value.kind == "unavailable"
    limit.end(searches[0])
    limit.begin(searches[2])


def test_requests_of_one_user_look_for_a_tenth_of_the_time_together():
    clock = Clock()
    throttle = nexus.PollThrottle(clock)
    assert throttle.charge("bob", 0.01) == pytest.approx(0.1) and throttle.charge("bob", 0.01) == pytest.approx(0.2), "they add up"
    assert throttle.charge("ann", 0.01) == pytest.approx(0.1), "no other user's wait for that"
    clock.now += 60
    assert throttle.charge("bob", 0.01) == pytest.approx(0.1), "what was free is not saved up"
    assert throttle.charge("bob", 9.0) == pytest.approx(0.6), "one long look counts as a short one"
    assert [throttle.charge("bob", 9.0) for _ in range(20)][-1] == 3.0, "but each looks at the latest after that"


def test_four_requests_of_a_user_are_worked_out_at_once():
    api = nexus.Api(types.SimpleNamespace(config=nexus.Config(), clock=Clock(), disk=nexus.DISK), "t" * 20)
    bob, ann, owner = nexus.Identity("bob", "bob", False), nexus.Identity("ann", "ann", False), nexus.Identity("own", "own", True)
    turns = [api.turn_of(bob).acquire(blocking=False) for _ in range(5)]
    assert turns == [True] * 4 + [False] and api.turn_of(ann).acquire(blocking=False), "nobody else's wait"
    for _ in range(9):
        with api.turn_of(owner):
            pass
