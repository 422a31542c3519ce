"""What tells the rows of a list apart."""

import pytest
from makers import job
from shown import listed

import nexus


def sweep(values, command="python train.py --lr {lr} --bs {bs}", **facts):
    """A job of a sweep; its number makes its id."""
    facts.setdefault("name", " ".join(f"{name}={text}" for name, text in values.items()))
    return {"sweep_values": tuple(values.items()), "command": nexus.fill_placeholders(command, values), "group": "g", **facts}


def plain(command, **facts):
    """A job of a group, with a command that is too long for a row."""
    return {"command": command.replace(" --", " --data /scratch/ann/data --", 1), "group": "g", **facts}


LABELS = [  # reason, what the jobs have, their labels
    ("what all have is left out", [sweep({"lr": "1e-3", "bs": size}) for size in ("32", "64")], ["bs=32", "bs=64"]),
    ("what differs, in the sweep's order", [sweep({"lr": rate, "bs": size}) for rate, size in (("1e-3", "32"), ("1e-4", "64"))],
     ["lr=1e-3 bs=32", "lr=1e-4 bs=64"]),
    ("a name of its own does not hide the values", [sweep({"lr": rate, "bs": "1"}, name="a name") for rate in "12"], ["lr=1", "lr=2"]),
    ("a sweep without a group", [sweep({"lr": rate, "bs": "1"}, group=None) for rate in "12"], ["lr=1", "lr=2"]),
    ("several programs with the same values", [sweep({"lr": "1", "bs": size}, f"python {file} --data /scratch/ann/datasets --bs={{bs}}")
                                                for file in "ab" for size in "34"],
     ["bs=3 a --bs=3", "bs=4 a --bs=4", "bs=3 b --bs=3", "bs=4 b --bs=4"]),
    ("the same again, after a retry", [sweep({"lr": rate, "bs": "1"}) for rate in "121"], ["lr=1", "lr=2", "lr=1"]),
    ("long values begin where they differ", [sweep({"lr": f"/scratch/ann/data/part-{part}.tar", "bs": "1"}) for part in "12"],
     ["lr=part-1.tar", "lr=part-2.tar"]),
    ("jobs of a loop in the shell", [plain(f"python train.py --data x --lr {rate} --bs {size} --out y") for rate, size in
                                     (("1e-3", "32"), ("1e-4", "64"))], ["--lr 1e-3 --bs 32", "--lr 1e-4 --bs 64"]),
    ("a word more or less", [plain("python train.py --out y"), plain("python train.py --amp --big --out y")], [None, "--amp --big"]),
    ("names that tell them apart", [plain(f"python train.py --seed {seed}", name=f"llama-sft-on-alpaca seed={seed}") for seed in "78"],
     ["7", "8"]),
    ("names that do not", [plain(f"python train.py --seed {seed}", name="train") for seed in "78"], ["--seed 7", "--seed 8"]),
    ("one command", [plain("python train.py", name=name) for name in "ab"], [None, None]),
    ("a name of values is never cut", [sweep({"lr": "1", "bs": "2"}), plain("true"), plain("true", group="h")],
     ["lr=1 bs=2", None, None]),
    ("alone, with a name of its own", [sweep({"lr": "1", "bs": "2"}, name="a name")], [None]),
    ("of no group: the program is told, too", [plain(f"python src/train.py --lr {rate} --out /scratch/ann/runs/seed-{rate}", group=None)
                                               for rate in "78"], ["train.py --lr 7 --out seed-7", "train.py --lr 8 --out seed-8"]),
    ("of no group, several programs", [plain(f"python {file} --seed 1", group=None) for file in ("a.py", "b.py")], [None, None]),
    ("of no group, named", [plain(f"python train.py --seed {seed}", group=None, name=seed) for seed in "78"], ["7", "8"]),
    ("short commands", [{"command": f"python train.py --lr {rate}", "group": "g"} for rate in "78"], [None, None]),
    ("several users", [{**sweep({"lr": rate, "bs": "1"}, name="x"), "user": user} for rate, user in (("1", "ann"), ("2", "bob"))],
     [None, None]),
]


@pytest.mark.parametrize("reason, facts, labels", LABELS, ids=[case[0] for case in LABELS])
def test_what_tells_rows_apart(reason, facts, labels):
    rows = listed(*(job(f"ab{letter}", **each) for letter, each in zip("cdefgh", facts)))
    made = nexus.label_rows(rows)
    assert [made.get(row["id"]) for row in rows] == labels, reason
    assert nexus.label_rows([*rows, *rows]) == made, "a row that is seen twice is the same"


def test_what_all_rows_of_a_sweep_have():
    rows = listed(*(job(f"ab{number}", **sweep({"lr": "1e-3", "bs": "64", "seed": number})) for number in "12"),
                  *(job(f"ac{number}", **sweep({"lr": number}, group="h")) for number in "12"), job("add", **sweep({"lr": "7"}, group="i")))
    assert nexus.list_common_values(rows) == ["the jobs of g all have lr=1e-3 bs=64"]


def test_what_another_user_may_not_see_has_no_label():
    rows = listed(*(job(f"ab{rate}", **sweep({"lr": rate, "bs": "1"})) for rate in "cd"))
    assert nexus.label_rows([nexus.hide_private(row, nexus.PUBLIC_JOB_KEYS) for row in rows]) == {}
