"""The numbers that a line of a job's output tells."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..values.text import format_line

# The results that a line tells: `loss=0.31`, `val acc: 91.2%`, `{'eval_loss': 0.3}`, and of those of which it is known
# which is better, `loss 0.31`.  A name is a word, with words like `val` before it.  Neither is one in a path, an
# address, an option or a time: what follows a name is a whole number.
METRIC_NUMBER = r"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?|(?i:nan|inf(?:inity)?))"
METRIC = (
    r"(?a)(?<![\w/.@#%&?=+\\$-])"
    r"(?P<name>(?:(?i:train|training|val|valid|validation|test|eval|dev|best|final|mean|avg|average|total)\ ){0,3}"
    r"[A-Za-z_][\w/.@%-]{0,59})(?P<quote>['\"]?)(?P<sign>\ {0,3}=\ {0,3}|\ {0,3}:\ {1,8}|:|\ {1,3})"
    r"(?:(?:tensor|array|(?:np\.)?float[0-9]{2})\()?"
    rf"(?P<number>{METRIC_NUMBER})(?=%?(?:[\s,;|()\]}}'\"±]|\.?(?:\s|$)))(?!,[0-9])")
NO_METRICS = r"(?:[A-Z]+:)*(?:INFO|WARN|WARNING|ERROR|DEBUG|FATAL|CRITICAL|NOTE|Info|Warning|Error|Note|\w*Error)"
LOW_FIRST = ("loss", "err", "error", "ppl", "perplexity", "mse", "rmse", "mae", "wer", "fid")
HIGH_FIRST = ("acc", "accuracy", "auc", "auroc", "f1", "iou", "miou", "map", "bleu", "reward")


def read_metrics(line: str) -> dict[str, float]:
    """{name: number} of the results in a line; of a name that comes twice, the last."""
    found = {}
    for match in re.finditer(METRIC, line):
        name, sign, is_whole = match["name"], match["sign"], match["number"].isdecimal()
        if sign == ":" and is_whole and not match["quote"]:             # localhost:8080
            continue
        if sign.isspace() and (is_whole or not find_direction(name)):   # `loss 0.3`, and not `took 3.5 s`
            continue
        if not re.fullmatch(NO_METRICS, name):
            found[name] = float(match["number"])
    return found


def find_metric_line(texts: Sequence[Sequence[str]]) -> str | None:
    """The last line with numbers of the first text that has one, cut to MAX_METRIC_LINE.  `texts`: lines."""
    line = next((line for lines in texts for line in reversed(lines) if read_metrics(line)), None)
    return line and format_line(line.strip())[:MAX_METRIC_LINE]


MAX_METRIC_LINE = 1000


def find_direction(name: str) -> str | None:
    """Which is better of the results of a name: "low" or "high"; None: unknown.  The last word decides: `acc_loss`."""
    for word in reversed(re.findall(r"[a-z]+[0-9]*", re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", name).lower())):
        for words, direction in ((LOW_FIRST, "low"), (HIGH_FIRST, "high")):
            if word in words or word.rstrip("0123456789") in words:
                return direction
    return None
