"""What a value is: a record that never changes.  The body of its class is a table with a row for each field."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..opening import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, ClassVar, NoReturn

    from ..opening import Schema, T

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        """For mypy alone."""
        return lambda cls: cls


class Field:
    """A row of a table: what the body of a value class says of one of its fields, beside its name and type."""
    default: Any = ...                          # ... = it must be given
    flag = metavar = like = ""                  # its option of the command line, `--gpus N`, and an example of the text
    text: Schema | None = None                  # a text that may be given instead, of which `parse` makes JSON
    parse: Callable[[str], Any] | None = None   # what makes JSON of a text; None: the type of `schema` says it
    convert: Callable[[Any], Any] | None = None                 # makes the kept value of a JSON value
    show: Callable[[Any], Any] | None = None                    # makes the JSON of a kept value
    asked = kept = False                        # a submission may set it; a retry takes it over
    repeats = False                             # its option may be given several times: a list or an object of them all
    live = live_in_slurm = False                # it may be changed of a running job; also of one that Slurm has
    slurm = ""                                  # why Slurm cannot run a job that has it; {} is its name
    for_gpus = False                            # only a job with GPUs may have it
    of_group = ""                               # the field of Group that it sets: a limit of the job's group
    setting = ""                                # the key of [jobs] that says what it is if a job does not
    also: tuple[str, ...] = ()                  # further flags of its option
    form = False                                # it is in the first part of the page's form
    label = line = ""                           # in the page's form; in `nexus show`, with {} for what it is
    chosen = False                              # what is not given is chosen: the sample file has it as a comment
    hidden = public = False                     # no reply has it; other users see it too
    unit = "text"                               # how people read it: a key of UNIT_TEXTS
    option = told = ""                          # its option's help if not `help`; a filter in messages: ` of group g`
    cause = ""                                  # of a limit: what ends a job that has reached it
    place = ""                                  # where a parameter of a call is: "path", "query" or "header"

    def __init__(self, schema: Schema, help: str = "", marks: str = "", flag: str = "", **facts: Any) -> None:
        self.schema, self.help = schema, help   # what it may be, in JSON; what it means, to people
        self.flag, _, self.metavar = flag.partition(" ")
        vars(self).update(dict.fromkeys(marks.split(), True), **facts)

    @property
    def takes_pairs(self) -> bool:
        """Whether its option is NAME=VALUE, each time for an entry of its object."""
        return bool(self.repeats and self.schema["type"] == "object")


def field(schema: Schema, help: str = "", marks: str = "", **facts: Any) -> Any:
    """A field that must be given."""
    return Field(schema, help, marks, **facts)


def optional(default: Any, schema: Schema, help: str = "", marks: str = "", **facts: Any) -> Any:
    """A field that may be left out."""
    return Field(schema, help, marks, default=default, **facts)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value:
    """A record that does not change.  The body of its class lists the fields, as that of a dataclass does.

    It has those of its base class, too.  An instance holds what was given; the default of any other field is an
    attribute of the class.
    """
    KINDS: Mapping[str, str] = {}               # {name: annotation} of the fields, in their order
    NAMES: ClassVar[tuple[str, ...]]            # of the fields, in their order
    KNOWN: ClassVar[frozenset[str]]             # these names
    REQUIRED: ClassVar[frozenset[str]]          # those without a default
    FIELDS: Mapping[str, Field] = {}            # the rows of the table
    WRITTEN: tuple[str, ...] = ()               # the fields that JSON has even if they are at their defaults

    def __init_subclass__(cls) -> None:
        rows = {name: row for name in cls.__annotations__ if isinstance(row := vars(cls).get(name), Field)}
        for name, row in rows.items():
            if row.default is ...:
                delattr(cls, name)
            else:
                setattr(cls, name, row.default)
        cls.KINDS, cls.FIELDS = {**cls.KINDS, **cls.__annotations__}, {**cls.FIELDS, **rows}
        cls.NAMES, cls.KNOWN = tuple(cls.KINDS), frozenset(cls.KINDS)
        cls.REQUIRED = frozenset(name for name in cls.NAMES if not hasattr(cls, name))

    def __init__(self, *given: Any, **named: Any) -> None:
        # The service makes thousands of these each second: so this is as short as it can be.
        facts = {**dict(zip(self.NAMES, given)), **named} if given else named
        if not (self.REQUIRED.issubset(facts) and self.KNOWN.issuperset(facts) and len(given) <= len(self.NAMES)):
            wrong = [*self.REQUIRED.difference(facts), *set(facts).difference(self.NAMES)]
            raise TypeError(f"{type(self).__name__}: missing or unknown: {', '.join(wrong) or 'too many'}")
        self.__dict__.update(facts)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is a value: use replace() to make another {name}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and (vars(self) == vars(other) or all(     # the first is quicker
            getattr(self, name) == getattr(other, name) for name in self.NAMES))

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.NAMES))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.NAMES)})"


def replace(old: T, **changes: Any) -> T:
    return type(old)(**{**vars(old), **changes})


def is_given(record: Value, name: str) -> bool:
    """Whether a field was given, even at its default."""
    return name in vars(record)
