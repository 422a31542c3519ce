"""The preamble: a Value is what a frozen dataclass is, and costs a command no import of dataclasses."""

import pytest
from makers import config, gpu, job

import nexus


class Point(nexus.Value):
    """A place."""
    x: int
    y: int = nexus.optional(2, nexus.integer_in(0, 9), "how high")
    tags: tuple = ()

    def moved(self, by):
        return nexus.replace(self, x=self.x + by)


class Place(nexus.Value):
    x: int
    y: int = 2
    tags: tuple = ()


def test_fields_and_defaults():
    assert (Point(1).x, Point(1).y, Point(1).tags) == (1, 2, ())
    assert Point(1, 3, ("a",)) == Point(x=1, y=3, tags=("a",)) and Point(1, y=2) == Point(1)
    assert (Point.NAMES, list(Point.FIELDS)) == (("x", "y", "tags"), ["y"])
    for make, name in ((lambda: Point(), "x"), (lambda: Point(1, 2, (), 4), "too many"), (lambda: Point(1, z=3), "z")):
        with pytest.raises(TypeError, match=f"Point: missing or unknown: {name}$"):
            make()


def test_it_is_frozen():
    point = Point(1)
    for change in (lambda: setattr(point, "x", 2), lambda: setattr(point, "z", 2)):
        with pytest.raises(AttributeError, match=r"Point is a value: use replace\(\) to make another [xz]"):
            change()
    assert point == Point(1)


def test_equality_is_of_the_same_class_and_fields_and_hash_goes_with_it():
    assert Point(1) == Point(1) != Point(2)
    assert Point(1) != Place(1), "another class with the same fields"
    assert Point(1) != (1, 2, ()) and Point(1) != None  # noqa: E711
    assert len({Point(1), Point(1, 2), Point(2)}) == 2
    assert {job("abc"): 1}[job("abc")] == 1 and hash(config()) == hash(config()) and hash(gpu(0))


def test_repr_is_how_to_make_it():
    assert repr(Point(1, tags=("a",))) == "Point(x=1, y=2, tags=('a',))"
    assert eval(repr(job("abc")), vars(nexus)) == job("abc")


def test_replace():
    point = Point(1, tags=("a",))
    assert nexus.replace(point, x=5) == Point(5, 2, ("a",)) and point.x == 1
    assert nexus.replace(point) == point and point.moved(1).x == 2
    with pytest.raises(TypeError, match="z"):
        nexus.replace(point, z=1)
