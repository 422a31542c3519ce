"""What services of several users tell each other, and what else may lie in their folder.

A lock is a process's: whoever else there is, is another process.
"""

import errno
import os
import shutil
import subprocess
import sys

import pytest
import turns

import nexus

BID = nexus.Bid((nexus.Want(1, ("GPU-1",), 3, 100.0),), (nexus.Holding("GPU-2", 100, 90.0),), 12.5, 2.0, 1, 3)
NAME = "bid-00000000000000aa"           # which some other service gave its file

OTHER = """
import contextlib, fcntl, json, os, socket, sys
kept = []
def put(name, text='{"ended_s":1}', mode=0o644):
    handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.pwrite(handle, text.encode("latin-1"), 0)
    os.fchmod(handle, mode)
    kept.append(handle)
    return handle
def guard(name, text='{"ended_s":1}', mode=0o644):
    fcntl.lockf(put(name, text, mode), fcntl.LOCK_EX)
def close():
    while kept:
        os.close(kept.pop())
def is_guarded(name):
    kept.append(os.open(name, os.O_RDONLY))
    try:
        fcntl.lockf(kept[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
for line in sys.stdin:
    try:
        exec(json.loads(line))
        print(flush=True)
    except Exception as error:
        print(repr(error), flush=True)
"""


@pytest.fixture(scope="module")
def process():
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        yield made
        made.stdin.close()


@pytest.fixture
def other(process, tmp_path):
    """Python code that another process executes in the folder."""
    def act(code):
        process.stdin.write(nexus.encode_json(code) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "\n", code
    act(f"os.chdir({str(tmp_path)!r})")
    yield act
    act("close()")


class CountingDisk(nexus.Disk):
    """A disk that keeps what is asked of it."""

    def __init__(self):
        self.calls = []
        for name in [name for name in vars(nexus.Disk) if not name.startswith("_")]:
            setattr(self, name, self.count(name, getattr(self, name)))

    def count(self, name, operation):
        return lambda *given, **named: self.calls.append(name) or operation(*given, **named)


@pytest.fixture
def ann(tmp_path):
    made = nexus.Bids(CountingDisk(), str(tmp_path), os.geteuid(), turns.FakeClock())
    made.clock.new_token = nexus.Clock().new_token
    yield made
    made.withdraw()
    for found in made.others.values():
        os.close(found.handle)


now = nexus.Clock.now


def look(bids, at=None, pause_s=0.1):
    bids.clock.ticks += pause_s
    return [found.bid for found in bids.look(at or now())]


def look_later(bids):
    """When the folder did not change just before."""
    return look(bids, now() + 2 * nexus.RACE_S)


def encode(bid):
    return nexus.encode_json(bid)


def read_own(bids):
    """By the handle: whoever opens and closes the file takes the lock from his own process."""
    return nexus.decode_value(nexus.Bid, nexus.load_json(os.pread(bids.own.handle, 99999, 0).decode()))


def test_a_bid_is_read_as_it_was_written(ann, other, tmp_path):
    other(f"guard({NAME!r}, {encode(BID)!r})")
    found, = ann.look(now())
    assert (found.bid, found.uid, found.user) == (BID, os.geteuid(), nexus.find_user(os.geteuid()))
    ann.tell(BID)
    name, = set(os.listdir(tmp_path)) - {NAME}
    assert nexus.BID_NAME.fullmatch(name) and (tmp_path / name).stat().st_mode & 0o777 == 0o644
    assert read_own(ann) == BID
    assert len(look(ann)) == 1, "the own one is no other's"
    other(f"assert is_guarded({name!r})")
    ann.withdraw()
    assert os.listdir(tmp_path) == [NAME]


def test_a_bid_that_shrinks_and_grows(ann):
    for bid in (BID, nexus.Bid(ended_s=1.0), BID, nexus.Bid()):
        for _ in range(2):
            ann.tell(bid)
            assert read_own(ann) == bid and os.stat(ann.own.path).st_size == len(encode(BID))
    assert ann.disk.calls.count("open") == 1


def test_what_did_not_change_is_touched(ann):
    ann.tell(BID)
    ann.disk.calls.clear()
    os.utime(ann.own.handle, (1, 1))
    ann.tell(BID)
    assert ann.disk.calls == ["stat", "touch"] and os.stat(ann.own.handle).st_mtime > 1


def test_of_a_bid_that_is_too_long_the_last_wants_are_left_out(ann):
    wants = tuple(nexus.Want(1, tuple(f"MIG-{number:036}" for number in range(100)), 1, float(number)) for number in range(8))
    ann.tell(nexus.replace(BID, wants=wants))
    told = read_own(ann)
    assert told.holdings == BID.holdings and 1 < len(told.wants) < 8 and told.wants == wants[:len(told.wants)]


STRANGE = [  # reason, how it comes into the folder
    ("nobody has locked it", f"put({NAME!r})"),
    ("who reads it has locked it", f"put({NAME!r}); fcntl.lockf(os.open({NAME!r}, os.O_RDONLY), fcntl.LOCK_SH)"),
    ("who reads it has locked it, with flock", f"put({NAME!r}); fcntl.flock(os.open({NAME!r}, os.O_RDONLY), fcntl.LOCK_EX)"),
    ("who writes it has locked it, with flock", f"fcntl.flock(put({NAME!r}), fcntl.LOCK_EX)"),
    ("all may write it", f"guard({NAME!r}, mode=0o666)"),
    ("its group may write it", f"guard({NAME!r}, mode=0o664)"),
    ("it is not finished", "guard('new-bid-00000000000000aa')"),
    ("no nexus gives such a name", "guard('bid-x'); guard('bid-00000000000000aaa'); guard('bid-00000000000000ag'); guard('GPU-1')"),
    ("a link", f"guard('x'); os.symlink('x', {NAME!r})"),
    ("a link to nothing", f"os.symlink('/nowhere', {NAME!r})"),
    ("a link to itself", f"os.symlink({NAME!r}, {NAME!r})"),
    ("a FIFO", f"os.mkfifo({NAME!r})"),
    ("a FIFO that somebody writes", f"os.mkfifo({NAME!r}); kept.append(os.open({NAME!r}, os.O_RDWR))"),
    ("a folder", f"os.mkdir({NAME!r})"),
    ("a socket", f"socket.socket(socket.AF_UNIX).bind({NAME!r})"),
    ("its process has ended", f"guard({NAME!r}); close()"),
    ("it cannot be read", f"guard({NAME!r}, mode=0)" if os.geteuid() else f"put({NAME!r}, mode=0)"),
    ("who opens it would wait", "import signal; signal.signal(signal.SIGIO, signal.SIG_IGN); "
     f"fcntl.fcntl(put({NAME!r}), fcntl.F_SETLEASE, fcntl.F_WRLCK)"),
    ("1 GB of nothing", f"guard({NAME!r}, ''); os.truncate({NAME!r}, 2**30)"),
]
CONTENTS = [  # reason, what is in it
    ("nothing", ""), ("no JSON", "bob wants all"), ("an unfinished bid", encode(BID)[:-1]), ("no object", "[]"),
    ("a number", "1"), ("null", "null"),
    ("lists without end", "[" * 16000), ("objects without end", '{"wants":' * 1700), ("lists in a list of wants", '{"wants":[[[]]]}'),
    ("more than is read", '{"ended_s":1,"x":"' + 20000 * "x" + '"}'), ("more parts than is read", encode(nexus.Bid(BID.wants * 150))),
    ("no UTF-8", '{"ended_s":1,"x":"\xff"}'), ("zeros", "\0" * 4096),
    ("half a letter", '{"wants":[{"gpus":1,"uuids":["\\ud800"],"jobs":1,"since":1}]}'),
    *((f"ended_s is {number}", f'{{"ended_s":{number}}}') for number in (
        "NaN", "Infinity", "-Infinity", "1e999", "-1e10", "1e16", "9" * 4000, "9" * 16000, "true", '"1"', "null", "[]", "{}")),
    *((f"run_s is {number}", f'{{"run_s":{number}}}') for number in ("NaN", "1e999", "-1", "9" * 400)),
    *((f"running is {number}", f'{{"running":{number}}}') for number in ("-1", "1.5", "1e3", "2000000000", "9" * 400)),
    *((f"a want of {gpus} GPUs", f'{{"wants":[{{"gpus":{gpus},"uuids":["GPU-1"],"jobs":1,"since":1}}]}}') for gpus in (
        "-1", "0.5", "NaN", '"1"', "null", "9" * 400)),
    *((f"a want since {since}", f'{{"wants":[{{"gpus":1,"uuids":["GPU-1"],"jobs":1,"since":{since}}}]}}') for since in (
        "-1", "NaN", "1e15", '"now"', "null")),
    *((f"GPUs that are {uuids}", f'{{"wants":[{{"gpus":1,"uuids":{uuids},"jobs":1,"since":1}}]}}') for uuids in (
        '"GPU-1"', "[1]", '[""]', '["\\n"]', f'["{"x" * 200}"]', "null", '{"GPU-1":1}')),
    ("a want without its GPUs", '{"wants":[{"gpus":1,"jobs":1,"since":1}]}'), ("a want of wants", '{"wants":[{"wants":[]}]}'),
    ("a GPU that is left to somebody's name", '{"leaves":{"GPU-1":"bob"}}'), ("GPUs that are left to nobody", '{"leaves":["GPU-1"]}'),
    ("a share below 0", '{"holdings":[{"uuid":"GPU-1","share":-100,"since":1}]}'),
    ("who collects is 1", '{"wants":[{"gpus":1,"uuids":["GPU-1"],"jobs":1,"since":1,"collects":1}]}'),
]
STRANGE += [(f"in it: {reason}", f"guard({NAME!r}, {text!r})") for reason, text in CONTENTS]


@pytest.mark.parametrize("reason, plant", STRANGE, ids=[case[0][:60] for case in STRANGE])
def test_what_is_no_bid_counts_for_nothing(ann, other, reason, plant):
    """It raises nothing, keeps nobody waiting, and costs no handle; a bid beside it is heard, also when it comes later."""
    other(plant)
    first = look(ann)
    assert first in ([], [nexus.Bid()]), reason
    other(f"guard('bid-00000000000000bb', {encode(BID)!r})")
    for _ in range(3):
        assert look(ann) == [BID]
    assert len(ann.others) <= 2
    ann.tell(BID)
    assert look(ann) == [BID]


def test_what_is_no_bid_leaves_the_bid_before(ann, other):
    """A service may be killed while it writes."""
    other(f"guard({NAME!r}, {encode(BID)!r})")
    assert look(ann) == [BID]
    for _, text in CONTENTS:
        other(f"os.truncate({NAME!r}, 0); put({NAME!r}, {text!r}); fcntl.lockf(kept[-1], fcntl.LOCK_EX)")
        assert look(ann) == [BID]


def test_a_bid_counts_until_its_process_has_ended(ann, other):
    other(f"guard({NAME!r}, {encode(BID)!r})")
    assert look(ann) == [BID] and len(ann.others) == 1
    other("close()")
    for _ in range(2):
        assert look(ann) == [] and not ann.others
    other(f"guard({NAME!r})")
    assert look(ann) == [nexus.Bid(ended_s=1.0)], "it is another service's now"


def test_a_service_that_hangs_counts_no_more(ann, other):
    other(f"guard({NAME!r}, {encode(BID)!r})")
    assert look(ann, now()) == [BID] and look(ann, now() + nexus.HUNG_S) == []
    other(f"os.utime({NAME!r})")
    assert look(ann, now() + nexus.HUNG_S) == [BID]


@pytest.mark.parametrize("changed_at, counts", [(0, False), (2**40, True)])
def test_the_time_of_a_bid_is_its_owners(ann, other, changed_at, counts):
    """One of the past has hung until it changes; one of the future is of now."""
    other(f"guard({NAME!r}, {encode(BID)!r}); os.utime({NAME!r}, ({changed_at}, {changed_at}))")
    assert look(ann) == [BID] * counts and look(ann, now() + nexus.HUNG_S + 1) == []
    other(f"os.utime({NAME!r}, ({changed_at + 1}, {changed_at + 1}))")
    assert look(ann) == [BID]


def test_one_file_counts_once(ann, other):
    """Whoever owns the folder can rename all that is in it, and where links are not protected each can make them."""
    other(f"guard({NAME!r}, {encode(BID)!r}); os.link({NAME!r}, 'bid-00000000000000bb')")
    assert look(ann) == [BID]
    other(f"os.rename({NAME!r}, 'bid-00000000000000cc')")
    assert look(ann) == [BID] == look(ann)


@pytest.mark.parametrize("act", ["os.link(own, 'bid-00000000000000bb')", "os.rename(own, 'bid-00000000000000bb')"])
def test_the_own_bid_under_another_name_stays_guarded(ann, other, act):
    """To open and close it would take the lock away."""
    ann.tell(BID)
    own = os.path.basename(ann.own.path)
    other(f"own = {own!r}; {act}")
    assert look(ann) == []
    other("assert is_guarded('bid-00000000000000bb')")


def test_the_own_bid_that_is_put_under_a_name_just_then_is_made_anew(ann, other, tmp_path):
    ann.tell(BID)
    own = ann.own
    other(f"put({NAME!r})")
    open_file = ann.disk.open
    ann.disk.open = lambda path, *given, **named: (
        path == NAME and os.replace(own.path, tmp_path / NAME), open_file(path, *given, **named))[1]
    assert look(ann) == []
    ann.tell(BID)
    assert ann.own.path != own.path and os.path.exists(ann.own.path)


REMOVALS = [  # reason, how it goes
    ("a cleaner of old files", lambda path: os.unlink(path)),
    ("the folder's owner renames it", lambda path: os.rename(path, path.parent / "x")),
    ("the folder's owner puts another there", lambda path: ((path.parent / "x").touch(), os.rename(path.parent / "x", path))),
    ("the folder's owner puts another folder there", lambda path: (
        path.parent.rename(path.parent.with_suffix(".old")), path.parent.mkdir())),
]


@pytest.mark.parametrize("reason, remove", REMOVALS, ids=[case[0] for case in REMOVALS])
def test_a_bid_that_was_removed_is_made_anew(ann, other, tmp_path, reason, remove):
    ann.tell(BID)
    old = ann.own
    remove(tmp_path / os.path.basename(old.path))
    ann.tell(BID)
    assert ann.own.path != old.path and os.path.exists(ann.own.path) and read_own(ann) == BID, reason
    assert look(ann) == []
    other(f"os.chdir({str(tmp_path)!r}); guard({NAME!r}, {encode(BID)!r})")
    assert look(ann) == [BID]


def test_a_folder_that_is_not_there(ann, other, tmp_path):
    other(f"guard({NAME!r}, {encode(BID)!r})")
    assert look(ann) == [BID]
    shutil.rmtree(tmp_path)
    assert look(ann) == [BID], "who tells it is there"
    with pytest.raises(FileNotFoundError):
        ann.tell(BID)
    tmp_path.mkdir()
    ann.tell(BID)
    other("close()")
    assert look(ann) == []


def test_nothing_elsewhere_is_touched_where_the_folder_is_a_link(ann, tmp_path):
    """Its owner may exchange it, and what has such a name elsewhere is nobody's litter."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in (NAME, "new-bid-00000000000000bb"):
        (elsewhere / name).write_text("mine")
        os.utime(elsewhere / name, (1, 1))
    ann.folder = str(tmp_path / "link")
    os.symlink(elsewhere, ann.folder)
    assert look(ann) == [] and sorted(path.read_text() for path in elsewhere.iterdir()) == ["mine", "mine"]


def test_own_litter_is_removed(ann, other, tmp_path):
    """And nothing that another service of this user has, or is about to have."""
    old = "os.utime('new-bid-00000000000000cc', (1, 1)); "
    other(f"guard({NAME!r}, {encode(BID)!r}); put('bid-00000000000000bb'); put('new-bid-00000000000000cc'); {old}"
          "put('new-bid-00000000000000dd'); put('bid-mine'); put('bid-00000000000000ee', mode=0o666)")
    look(ann)
    assert sorted(os.listdir(tmp_path)) == [NAME, "bid-00000000000000ee", "bid-mine", "new-bid-00000000000000dd"]


def test_nobody_has_more_than_a_few(ann, other):
    """The place of one that ends is another's."""
    other(f"for number in range(6): guard(f'bid-{{number:016}}', {encode(BID)!r})")
    assert len(look(ann)) == nexus.MAX_BIDS_OF_USER == len(ann.others)
    taken = sorted(ann.others)
    other(f"handle, = [each for each in kept if os.path.samestat(os.fstat(each), os.stat({taken[0]!r}))]\n"
          "os.close(handle); kept.remove(handle)")
    assert len(look(ann)) == nexus.MAX_BIDS_OF_USER and taken[0] not in ann.others


def test_no_handle_is_lost_where_there_are_no_more(ann, other):
    """And what could not be looked at is looked at later."""
    other(f"guard({NAME!r}, {encode(BID)!r})")
    before, real = len(os.listdir("/proc/self/fd")), (ann.disk.open, ann.disk.pread)
    for name, at in (("open", 0), ("pread", 1)):
        def fail(path, *given, at=at, **named):
            if path == NAME or at:
                raise OSError(errno.EMFILE, "too many open files")
            return real[0](path, *given, **named)
        setattr(ann.disk, name, fail)
        assert look(ann) == [] and len(os.listdir("/proc/self/fd")) == before
        ann.disk.open, ann.disk.pread = real
    assert look(ann) == [BID]
    ann.disk.pread = fail
    other(f"os.utime({NAME!r})")
    assert look(ann) == [] and len(os.listdir("/proc/self/fd")) == before, "it raises nothing"


def test_a_bid_that_cannot_be_written_says_nothing(ann, tmp_path):
    ann.tell(BID)
    write = ann.disk.pwrite
    ann.disk.pwrite = lambda handle, content, at: write(handle, content[:9], at) if at == 0 else no_room()

    def no_room():
        raise OSError(errno.ENOSPC, "no room")

    with pytest.raises(OSError, match="no room"):
        ann.tell(nexus.Bid(ended_s=3.0))
    assert os.listdir(tmp_path) == []
    ann.disk.pwrite = write
    ann.tell(BID)
    assert ann.disk.calls.count("open") == 2


# What it costs


def test_alone_a_look_is_one_stat(ann):
    look_later(ann)
    ann.disk.calls.clear()
    look_later(ann)
    assert ann.disk.calls == ["stat"]
    ann.tell(BID)
    look_later(ann)
    ann.disk.calls.clear()
    look_later(ann)
    assert ann.disk.calls == ["stat"], "the own bid costs nothing"


@pytest.mark.parametrize("text", ["{}", encode(BID), "[" * 16000, '{"wants":[' + "{}," * 5000])
def test_a_look_costs_the_same_whatever_they_contain(ann, other, text):
    other(f"for number in range(3): guard(f'bid-{{number:016}}', {text!r})")
    look_later(ann)
    ann.disk.calls.clear()
    look_later(ann)
    assert sorted(ann.disk.calls) == ["is_guarded"] * 3 + ["stat"] * 4
    other("for handle in kept: os.utime(handle, (7, 7))")
    ann.disk.calls.clear()
    look_later(ann)
    assert sorted(ann.disk.calls) == ["is_guarded"] * 3 + ["pread"] * 3 + ["stat"] * 4


class SlowClock(turns.FakeClock):
    """Each operation of the disk takes so long."""

    def __init__(self, disk, operation_s):
        super().__init__()
        self.disk, self.operation_s = disk, operation_s

    def monotonic(self):
        return self.ticks + len(self.disk.calls) * self.operation_s


def put_many(bids, names):
    """Another user's files, which nobody has locked, and which are listed first."""
    listdir, ask, open_file = bids.disk.listdir, bids.disk.stat, bids.disk.open
    status = os.stat_result((0o100644, 1, 1, 1, os.geteuid() + 1, 0, 2, *[now()] * 3))
    bids.disk.listdir = lambda folder: [*names, *listdir(folder)]
    bids.disk.stat = lambda path, *given, **named: ask("/" if path in names else path, *given, **named) and (
        status if path in names else ask(path, *given, **named))
    bids.disk.open = lambda path, *given, **named: open_file("/etc/passwd" if path in names else path, *given, **named)


def test_thousands_of_names_are_judged_once_and_piece_by_piece(ann, other):
    """A bid among them is heard soon."""
    ann.clock = SlowClock(ann.disk, 1e-5)
    put_many(ann, {f"bid-{number:016}" for number in range(3000)})
    other(f"guard({NAME!r}, {encode(BID)!r})")
    most, looks = 0, 0
    while not look_later(ann):
        most, looks = max(most, len(ann.disk.calls)), looks + 1
        ann.disk.calls.clear()
        ann.clock.ticks += 1.0
    assert looks <= 3000 / nexus.MAX_NEW_NAMES and most < 10 * nexus.MAX_NEW_NAMES
    ann.disk.calls.clear()
    look_later(ann)
    assert ann.disk.calls.count("open") == 0


def test_who_makes_names_all_the_time_takes_a_thirtieth_of_the_time(ann, other):
    """And keeps nobody from being heard."""
    ann.clock, names, heard = SlowClock(ann.disk, 1e-5), set(), []
    put_many(ann, names)
    began = ann.clock.monotonic()
    for turn in range(100):
        names.clear()
        names.update(f"bid-{1000 * turn + number:016}" for number in range(400))
        if turn == 10:
            other(f"guard({NAME!r}, {encode(BID)!r})")
        ann.listed = ()
        if look(ann, pause_s=0.01):
            heard.append(turn)
    took = len(ann.disk.calls) * ann.clock.operation_s
    assert took < (ann.clock.monotonic() - began) / 20 and heard and heard[0] < 90
    assert len(ann.judged) <= 400


def test_who_changes_a_large_bid_all_the_time_takes_a_thirtieth_of_the_time(ann, other, tmp_path):
    """And keeps nobody from being read: who was read last comes last."""
    other(f"guard({NAME!r}); guard('bid-00000000000000bb', {encode(BID)!r})")
    look_later(ann)
    ann.clock, reads = SlowClock(ann.disk, 0.0), []
    read = ann.disk.pread

    def read_slowly(handle, *given):
        reads.append(handle)
        ann.clock.ticks += 1e-3 if handle == ann.others[NAME].handle else 1e-4
        return read(handle, *given)

    ann.disk.pread = read_slowly
    began = ann.clock.monotonic()
    for turn in range(1, 500):
        for name in ann.others:
            os.utime(tmp_path / name, ns=(turn, turn))
        look(ann, now() + 1, pause_s=0.002)
    took = 1e-3 * reads.count(ann.others[NAME].handle) + 1e-4 * reads.count(ann.others["bid-00000000000000bb"].handle)
    assert took < (ann.clock.monotonic() - began) / 25 and reads.count(ann.others["bid-00000000000000bb"].handle) > 20


def test_a_name_that_comes_while_the_folder_is_listed_is_found(ann, other):
    """A folder may change twice at the same time, as its clock has it."""
    listdir = ann.disk.listdir

    def change(folder):
        found = listdir(folder)
        other(f"guard({NAME!r}, {encode(BID)!r})")
        ann.disk.listdir = listdir
        return found

    ann.disk.listdir = change
    stamp, ask = os.stat(ann.folder), ann.disk.stat
    ann.disk.stat = lambda path, *given, **named: stamp if path == ann.folder else ask(path, *given, **named)
    at = stamp.st_ctime
    assert look(ann, at) == [] and look(ann, at) == [BID]


# Whose it is


@pytest.mark.parametrize("uid, found", [(100000, 0), (165535, 0), (165536, 165536), (99999, 99999), (300000, 12345), (500000, 500000)])
def test_a_uid_for_containers_is_its_users(tmp_path, monkeypatch, uid, found):
    (tmp_path / "subuid").write_text("# comment\nroot:100000:65536\n12345:300000:10\nnobody-here:500000:10\nroot:x:9\n")
    monkeypatch.setattr(nexus, "SUBUID_FILE", str(tmp_path / "subuid"))
    user = nexus.find_user(found)
    assert nexus.find_account(nexus.DISK, uid) == (found, user)


def test_where_nobody_has_uids_for_containers_a_uid_is_its_own(monkeypatch):
    monkeypatch.setattr(nexus, "SUBUID_FILE", "/nowhere")
    assert nexus.find_account(nexus.DISK, 123456) == (123456, "uid 123456")
    assert nexus.find_account(nexus.DISK, 0) == (0, "root")


def test_who_tells_nothing_has_nothing_and_wants_nothing():
    """As a service of another version may leave out what this one reads."""
    assert nexus.decode_value(nexus.Bid, {}) == nexus.Bid((), (), 0.0, 60.0, 0, 0, {})
    wants = [{"gpus": 1, "uuids": ["GPU-1"], "jobs": 1, "since": 9.0}]
    assert nexus.decode_value(nexus.Bid, {"wants": wants}).wants == (nexus.Want(1, ("GPU-1",), 1, 9.0, False),)
