"""Why a job failed, in its output: the line that tells the cause."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..values.text import format_line

TAIL_BYTES = 65536              # the end of stderr that is searched for the cause of a failure
OUT_OF_MEMORY = (         # PyTorch, CUDA's own libraries, CuPy, JAX, TensorFlow, NCCL, RAPIDS, llama.cpp, vLLM
    r"CUDA out of memory|CUDA (driver |runtime )?error: ?out of memory|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED|cuda\.OutOfMemoryError"
    r"|OutOfMemoryError: Out of memory allocating|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating tensor"
    r"|Cuda failure (\d+ )?'out of memory'|out_of_memory: (CUDA|RMM)|cudaMalloc failed: out of memory"
    r"|No available memory for the cache blocks|less than desired GPU memory utilization")
TRACEBACK = "Traceback (most recent call last)"
SEVERAL_COUNT = (           # the last traceback is a launcher's, of a failed process, or follows from those before
    r"\b(ChildFailedError|ProcessExitedException|CalledProcessError)\b"
    r"|During handling of the above|The above exception was")
SOURCE_LINE = r"(\[\w+\]: )? {4}"         # of a traceback; torchrun puts the rank before it


def find_oom_line(text: str) -> str | None:
    """The line that says that a program ended for lack of GPU memory; None if it did not.  `text`: its stderr.

    A program may log such an error and go on: without SEVERAL_COUNT, only the last one of Python's tracebacks counts.
    """
    before, *tracebacks = text.split(TRACEBACK)
    counted = tracebacks if re.search(SEVERAL_COUNT, text) else tracebacks[-1:]
    for line in "".join(counted or [before]).splitlines():
        if re.search(OUT_OF_MEMORY, line) and not re.match(SOURCE_LINE, line):
            return format_line(line.strip(), 300).strip()
    return None


# What bash wrote into stderr.log of a command that a signal ended, until job.sh had its own words go nowhere: the whole
# text, with the variables.  The end of a log may begin in the middle of that.
RUNNER_WORDS = r"/job\.sh: \S+ \d+: +\d+ "          # before the variables
RUNNER_REST = r' /usr/bin/env -u _ -- |"\$@" (bash|/usr/bin/env) '
# What a shell says of a program that a signal ended: `bash: line 1:   565 Aborted     (core dumped) python x.py`.  bash
# puts blanks behind its word, in any language; dash says the word alone; the last ones are zsh's, fish's, and others'.
SIGNAL_WORDS = ("Hangup|Interrupt|Quit|Illegal instruction|Trace/breakpoint trap|Aborted|Bus error|Killed|Terminated"
                "|Floating point exception|User defined signal [12]|Segmentation fault|Alarm clock|Bad system call"
                "|CPU time limit exceeded|File size limit exceeded|Virtual timer expired|Stack fault")
SHELL_WORDS = "|".join((
    rf".*: \S+ \d+: +\d+ (({SIGNAL_WORDS}).*|[^\d\s:][^:]{{1,22}}? {{2,}}.*)", rf".*: +\d+ ({SIGNAL_WORDS}) {{2,}}.*",
    rf"({SIGNAL_WORDS})( +\(core dumped\))?",
    r"\S+:(\d+:)? (hangup|interrupt|quit|illegal hardware instruction|trace trap|abort|bus error|killed|terminated"
    r"|floating point exception|user-defined signal [12]|segmentation fault)( +\(core dumped\))?  +\S.*",
    r"fish: (Job \d+, )?'.*' terminated by signal SIG.*", r"timeout: the monitored command dumped core",
    r"Command terminated by signal \d+"))
MAX_LINES = 1000                # of a log's end
# tqdm's: ` 45%|####5     | 9/20 [00:10<00:12,  1.13s/it]`, or `9it [00:10,  1.13s/it]`
PROGRESS_BAR = r"(?:[^|]*\d{1,3}%\|[^|]*\|(?:[^][]*\[\d+:\d+[^]]*\]|.*)|(?:.*?: )?\d+it \[\d+:\d+[^]]{0,100}\])"


def find_last_lines(text: str, count: int) -> list[str]:
    """The last non-empty lines, as a terminal would show them, without colours and other escape sequences."""
    return take_last((line.rpartition("\r")[2] for line in list_lines(text)), count)


def find_cause_lines(text: str, count: int) -> list[str]:
    """The last lines that may say why a program failed: no progress bars, and no shell's words of a signal."""
    return take_last(map(drop_progress, list_lines(text)), count)


def list_lines(text: str) -> Iterable[str]:
    """From the last to the first, without empty ones, MAX_LINES at most.

    Jobs may end together, and the service waits for this: so it takes as long as the text is long, whatever it says.
    """
    import itertools
    text = drop_escapes(text)
    lines = list(itertools.takewhile(lambda line: not is_runner_line(line), text.split("\n")))
    is_rest = re.search(RUNNER_REST, "\n".join(lines))
    said = (line.rstrip("\r") for line in reversed(lines) if line and not line.isspace())
    return [] if is_rest else itertools.islice(said, MAX_LINES)


def drop_escapes(text: str) -> str:
    """A text without colours and other escape sequences."""
    return re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))", "", text)


def is_runner_line(line: str) -> bool:
    before, mark, _ = line.rpartition("NEXUS_JOB_NONCE=")
    return bool(mark and re.search(RUNNER_WORDS, before))


def drop_progress(line: str) -> str:
    """What may be the cause of a failure in a line, or ""."""
    *before, last = line.split("\r")
    words = re.sub(f"^{PROGRESS_BAR}", "", last)        # an error may follow a bar
    if words == last and before and not re.fullmatch(" +", before[-1]):     # it was drawn anew, and not cleared
        return ""
    return "" if re.fullmatch(SHELL_WORDS, words.strip()) else words


def take_last(lines: Iterable[str], count: int) -> list[str]:
    import itertools
    shown = (format_line(line.strip(), 300).strip() for line in lines)
    return list(itertools.islice(filter(None, shown), count))[::-1]
