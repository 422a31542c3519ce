"""What holds for every test: where nexus.py is, one time zone, nothing of the caller's own nexus."""

import gc
import os
import signal
import sys
import time
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

TESTS = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(TESTS), os.path.join(TESTS, "support")]
import samples  # noqa: E402

for ignored in (signal.SIGHUP, signal.SIGINT):          # by `nohup tests/run &`, and then by all that is started
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)

os.environ["TZ"] = "UTC"
time.tzset()
for name in [name for name in os.environ if name.startswith("NEXUS_") or name in ("NO_COLOR", "CUDA_VISIBLE_DEVICES")]:
    del os.environ[name]
# Else each command that a test runs compiles nexus.py anew, which takes most of a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The same examples at every run, and with --all many more, which the seed chooses.
slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("sample", derandomize=True, deadline=None, max_examples=30, suppress_health_check=slow_is_fine)
settings.register_profile("all", deadline=None, max_examples=2000, suppress_health_check=slow_is_fine)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="what takes long and finds little runs whole, with the date's seed, or "
                     "with that of --hypothesis-seed; otherwise a fixed sample runs")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    settings.load_profile("all" if config.option.all else "sample")
    if config.option.all:
        config.option.hypothesis_seed = config.option.hypothesis_seed or time.strftime("%Y%m%d")
        samples.is_whole, samples.seed = True, int(config.option.hypothesis_seed)


def pytest_sessionstart(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if samples.is_whole and reporter:                       # not in a worker
        reporter.write_line(f"seed: {samples.seed} (again: --all --hypothesis-seed={samples.seed})")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that share what is made once for their file stay together: otherwise each worker makes it.

    xdist starts the largest groups first, then the other tests, one by one.
    """
    for item in items:
        fixtures = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values()]     # and none that another one replaces
        if any(one.scope == "module" for one in fixtures) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish():
    """Have xdist be told of the groups: it writes an item's into _nodeid, which pytest does not read since 9.2."""
    plain = pytest.Item.nodeid
    with mock.patch.object(pytest.Item, "nodeid", property(lambda item: vars(item).get("_nodeid") or plain.fget(item))):
        answer = yield
    gc.freeze()                 # the tests and what they import stay to the end: not to be looked through again and again
    return answer


@pytest.fixture(scope="session")
def chromium():
    import pages
    with pages.launch() as launched:
        yield launched


@pytest.fixture(scope="module")
def browser(chromium):
    import pages
    yield chromium
    pages.park(chromium)


@pytest.fixture(scope="module")
def shared_box():
    import live
    with live.Box(gpus=2, is_supervised=False) as made:
        yield made


@pytest.fixture
def box(shared_box):
    """A service that the tests of a module share, one after another; a module that needs another has its own."""
    import live
    yield shared_box
    live.clear_jobs(shared_box)


@pytest.fixture
def world(tmp_path):
    """Makes a service that the test drives turn by turn."""
    import stores
    import turns
    worlds = []

    def make(**config):
        worlds.append(turns.World(tmp_path, **config))
        return worlds[-1]

    # Where programs are in the first folder of PATH, no process looks for them
    with stores.quick_disk(), mock.patch.dict(os.environ, PATH="/usr/bin:/bin"):
        yield make
        for made in worlds:
            made.close()


@pytest.fixture
def bench():
    import stage
    with stage.Bench() as made:
        yield made


@pytest.fixture
def leases():
    """Make Leases of a service in one folder, which other users reach too."""
    import shutil
    import tempfile

    import nexus
    top = tempfile.mkdtemp(prefix="nexus-test-")
    os.chmod(top, 0o755)
    folder = os.path.join(top, "nexus-leases")
    made = []

    def make(service_id="0-aaaaaaaa"):
        made.append(nexus.Leases(nexus.DISK, folder, service_id))
        return made[-1]

    make.folder = folder
    yield make
    for one in made:
        for job_id in list(one.held):
            one.close_own(job_id)
        for uuid in list(one.kept):
            one.drop(uuid)
    shutil.rmtree(top)
