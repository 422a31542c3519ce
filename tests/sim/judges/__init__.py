"""What nexus promises, and who sees in a history whether it holds: one file for each group of promises."""
from __future__ import annotations

from typing import Any

from judges.ends import Ends
from judges.guards import Guards
from judges.judge import Judge
from judges.kept import Kept
from judges.starts import Starts
from judges.told import Told

JUDGES = (Starts, Ends, Guards, Kept, Told)


def make_judges(actions: Any) -> list[Judge]:
    return [judge(actions) for judge in JUDGES]
