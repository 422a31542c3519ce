"""What holds for every test: where nexus.py is, one time zone, nothing of the caller's own nexus."""

import os
import signal
import sys
import time

import pytest
from hypothesis import HealthCheck, settings

TESTS = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(TESTS), os.path.join(TESTS, "support")]

for ignored in (signal.SIGHUP, signal.SIGINT):          # by `nohup tests/run &`, and then by all that is started
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)

os.environ["TZ"] = "UTC"
time.tzset()
for name in [name for name in os.environ if name.startswith("NEXUS_") or name in ("NO_COLOR", "CUDA_VISIBLE_DEVICES")]:
    del os.environ[name]

# The same examples at every run; HYPOTHESIS_PROFILE=search looks for new ones.
slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("steady", derandomize=True, deadline=None, max_examples=50,
                          suppress_health_check=slow_is_fine)
settings.register_profile("search", deadline=None, max_examples=2000, suppress_health_check=slow_is_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture(scope="module")
def browser():
    import pages
    with pages.launch() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def shared_box():
    import live
    with live.Box(gpus=2) as made:
        yield made


@pytest.fixture
def box(shared_box):
    """A service that the tests of a module share, one after another; a module that needs another has its own."""
    import pages
    yield shared_box
    pages.clear_jobs(shared_box)
