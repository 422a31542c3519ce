"""A Store in a folder, for each test."""

import pytest
from stores import Box


@pytest.fixture
def box(tmp_path):
    return Box(tmp_path / "home").open()
