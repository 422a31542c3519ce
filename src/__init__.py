"""The rooms of nexus.py, which build.py joins."""


def text_of(name: str) -> str:
    """The text of a file beside the room that asks for it: build.py puts it there as a string."""
    raise NotImplementedError(f"{name}: only nexus.py has it, which build.py makes")
