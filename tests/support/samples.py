"""What takes long and finds little: a fixed sample of it in `tests/run`, all of it in `tests/run --all`.

    @pytest.mark.parametrize("page", samples.choose(PAGES, 5))      # five of the pages, the same at every run; all with --all
    def test_page(page):
        for number in samples.random().sample(range(10**6), samples.count(20, 2000)):
            ...

Chance has one seed, `samples.seed`: a fixed one, or the date's with --all.  tests/conftest.py sets it; hypothesis and schemathesis
use it, too.
"""

import random as chance

is_whole, seed = False, 51


def count(usual, whole):
    """How many cases to try."""
    return whole if is_whole else usual


def random():
    """A source of chance of its own: what one test takes from it changes nothing for another."""
    return chance.Random(seed)


def choose(cases, usual):
    """So many of the cases, in their order, or all."""
    cases = list(cases)
    if is_whole or usual >= len(cases):
        return cases
    return [cases[index] for index in sorted(random().sample(range(len(cases)), usual))]
