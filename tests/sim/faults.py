"""Faults that are put in by hand, to see that the histories find them: tests/sim/run --fault NAME"""
from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

NEXUS = Path(__file__).parents[2] / "nexus.py"
FAULTS = {  # name: (a piece of nexus.py, what stands in its place)
    "the claim is not checked": (
        "    claim = take_claim(disk, folder, attempt)\n    if not claim.is_open:",
        "    claim = OUR_CLAIM\n    if not claim.is_open:"),
    "state.json.prev is a link": (
        "                    make_previous(self.disk, aside, path)\n            self.checkpoint_seq",
        '                    remove_file(self.disk, f"{path}.prev")\n'
        '                    self.disk.link(path, f"{path}.prev")\n            self.checkpoint_seq'),
    "a sync is left out": (
        "            append_whole(self.disk, self.handle, record, is_synced)",
        "            append_whole(self.disk, self.handle, record)"),
    "what ran before a kill is not told": (
        "            self.ended.extend(self.store.state.jobs.values())       # a killed service may not have written the last\n", ""),
    "a report is taken for another's": (
        "        found = [(jobs[job_report.key], job_report) for job_report in report.jobs if job_report.key in jobs]",
        "        found = [*zip(sorted(jobs.values(), key=lambda job: -job.number), report.jobs)]"),
    "a share is given twice": (
        "            held.setdefault(uuid, []).append((job, share))\n    return",
        "            held.setdefault(uuid, []).append((job, share // 2))\n    return"),
}


def put_in(name: str) -> None:
    """Have the histories run on a nexus.py with this fault."""
    piece, wrong = FAULTS[name]
    source = NEXUS.read_text()
    assert source.count(piece) == 1, f"nexus.py has {source.count(piece)} such places: {piece}"
    spec = importlib.util.spec_from_loader("nexus", loader=None, origin=str(NEXUS))
    assert spec
    module = types.ModuleType("nexus")
    module.__file__, module.__spec__ = str(NEXUS), spec
    sys.modules["nexus"] = module
    exec(compile(source.replace(piece, wrong), str(NEXUS), "exec"), vars(module))
