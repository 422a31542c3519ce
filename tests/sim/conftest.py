"""The modules of the simulator are beside their tests."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
