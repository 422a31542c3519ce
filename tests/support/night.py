"""A night as the service would have recorded it, in the home of one that does not run: for pictures, and for what reads them.

    place_night(box.home, time.time(), cards=2, hours=24, gap=(3, 2))      # for an hour nobody could read the GPUs

Nothing but time makes a day of records; the files are written by nexus's own functions, which have tests of their own.
"""

import math
import pathlib

import nexus


def place_night(home, now, cards=8, hours=24, others=None, gap=None):
    """Files for MOCK-0, MOCK-1, ...: each has a wave of load, except when nobody could read it.

    `others`: (card, first and last hour before now) when somebody else used one; `gap`: (first, last hour) when all were unread.
    """
    layout = nexus.make_layout(str(home), nexus.Config())
    pathlib.Path(layout.history_dir).mkdir(mode=0o700, exist_ok=True)
    begin = now // 60 * 60
    for card in range(cards):
        gpu = nexus.Gpu(card, f"MOCK-{card}", "Mock GPU", 24576.0)
        minutes = []
        for number in range(hours * 60, 0, -1):
            hour = number / 60
            load = max(0.0, 55 + 45 * math.sin(number / (37 + 9 * card)))
            is_others = others is not None and card == others[0] and others[1] >= hour >= others[2]
            if not (gap and gap[0] >= hour >= gap[1]):
                minutes.append(nexus.GpuMeans(begin - 60 * number, 20, load, 2000 + 200 * load, 40 + load / 3, 60 + 6 * load,
                                              100.0 if is_others else 0.0))
        nexus.write_means(nexus.DISK, layout.history_file(gpu.uuid), nexus.format_history_head(gpu), minutes)
    return layout


def make_id(number):
    letters, base = nexus.ID_LETTERS, len(nexus.ID_LETTERS)
    return "N" + "".join(letters[number // base**power % base] for power in (2, 1, 0))


def place_runs(layout, now, runs):
    """Rows for the lanes: dicts of GpuRun's fields, with `begin` and `end` in hours before now, and `card` or `cards`."""
    rows = []
    for number, facts in enumerate(runs):
        cards = facts.pop("cards", None) or (facts.pop("card"),)
        begin, end = facts.pop("begin"), facts.pop("end")
        rows.append(nexus.GpuRun(**{
            "id": make_id(number), "attempt": 1, "user": "root", "gpu_uuids": tuple(f"MOCK-{card}" for card in cards),
            "started_at": now - 3600 * begin, "finished_at": now - 3600 * end, "status": "completed", "outcome": "exit 0", **facts}))
    rows.sort(key=lambda row: row.finished_at)
    pathlib.Path(layout.runs_file).write_text("".join(nexus.seal(row) + "\n" for row in rows))
