"""Tests use the stages of other tests: test_conda.Conda, test_runner.box."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
