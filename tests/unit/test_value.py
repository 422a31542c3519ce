"""The preamble: `value` makes what dataclass(frozen=True, slots=True) makes, on every Python, and faster."""

import pytest
from makers import config, gpu, job

import nexus


@nexus.value
class Point:
    """A place."""
    x: int
    y: int = 2
    tags: tuple = ()

    def moved(self, by):
        return nexus.replace(self, x=self.x + by)

    @property
    def sum(self):
        return self.x + self.y


@nexus.value
class Place:
    x: int
    y: int = 2
    tags: tuple = ()


def test_fields_and_defaults():
    assert (Point(1).x, Point(1).y, Point(1).tags) == (1, 2, ())
    assert Point(1, 3, ("a",)) == Point(x=1, y=3, tags=("a",))
    with pytest.raises(TypeError):
        Point()
    with pytest.raises(TypeError):
        Point(1, 2, (), 4)
    with pytest.raises(TypeError):
        Point(1, z=3)


def test_it_is_frozen():
    point = Point(1)
    for change in (lambda: setattr(point, "x", 2), lambda: setattr(point, "z", 2), lambda: delattr(point, "x")):
        with pytest.raises(AttributeError):
            change()
    assert point == Point(1)
    with pytest.raises(AttributeError, match=r"Point is a value: use replace\(\) to make another x"):
        point.x = 2


def test_it_has_slots():
    assert not hasattr(Point(1), "__dict__") and Point.__slots__ == ("x", "y", "tags")


def test_equality_is_of_the_same_class_and_fields():
    assert Point(1) == Point(1) != Point(2)
    assert Point(1) != Place(1), "another class with the same fields"
    assert Point(1) != (1, 2, ()) and Point(1) != None  # noqa: E711


def test_hash_goes_with_equality():
    assert hash(Point(1)) == hash(Point(1)) and len({Point(1), Point(1), Point(2)}) == 2
    assert {job("abc"): 1}[job("abc")] == 1 and hash(config()) == hash(config()) and hash(gpu(0))
    with pytest.raises(TypeError):
        hash(Point([]))


def test_repr_is_how_to_make_it():
    assert repr(Point(1, tags=("a",))) == "Point(x=1, y=2, tags=('a',))"
    assert eval(repr(Point(1))) == Point(1)
    assert eval(repr(job("abc")), vars(nexus)) == job("abc")


def test_methods_properties_and_words_stay():
    assert Point(1).moved(2) == Point(3) and Point(1).sum == 3
    assert (Point.__name__, Point.__doc__, Point.__module__) == ("Point", "A place.", __name__)


def test_replace():
    point = Point(1, tags=("a",))
    assert nexus.replace(point, x=5) == Point(5, 2, ("a",)) and point.x == 1
    assert nexus.replace(point) == point
    with pytest.raises(TypeError, match="z"):
        nexus.replace(point, z=1)


def test_every_value_of_the_file_is_one():
    made = [each for each in vars(nexus).values() if isinstance(each, type) and "DEFAULTS" in vars(each)]
    assert {"Job", "Gpu", "Group", "Config", "Asked", "Damage", "JobsRow", "Plan", "Start", "Evidence", "Ended"} <= {
        each.__name__ for each in made}
    for each in made:
        assert all(name in each.__annotations__ for name in each.__slots__)
