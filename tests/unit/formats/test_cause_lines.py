"""What a job wrote at its end, and which line of it is the cause."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import job, texts

import nexus

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    train()\n    ^^^^^^^\n{}\n'
OOMS = [  # reason, the end of stderr, the line that says it
    ("PyTorch", "Traceback (most recent call last):\n  File \"a.py\", line 3\ntorch.OutOfMemoryError: CUDA out of memory. Tried to "
     "allocate 20.00 GiB. GPU 0 has a total capacity of 23.69 GiB\n", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
     "20.00 GiB. GPU 0 has a total capacity of 23.69 GiB"),
    ("the runtime", "RuntimeError: CUDA error: out of memory\n", "RuntimeError: CUDA error: out of memory"),
    ("cuBLAS", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
     "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("TensorFlow", "x\nOOM when allocating tensor with shape[1,2]\ny", "OOM when allocating tensor with shape[1,2]"),
    *[(words, f"x\n{words}\ny", words) for words in (
        "RuntimeError: CUDA driver error: out of memory",
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes (allocated so far: 149,250,113,536 bytes).",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.",
        "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: /rmm/cuda_memory_resource.hpp",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 800.00 MiB on device 0: cudaMalloc failed: out of memory",
        "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        "ValueError: Free memory on device (3.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB).")],
    ("harmless", "\x1b[31mCUDA out of memory\x1b[0m", "[31mCUDA out of memory [0m"),
    ("it was only logged", "WARNING:root:batch 0: CUDA out of memory, skipped\nTraceback (most recent call last):\n"
     "  File \"a.py\", line 3, in <module>\n    lr = config['lr']\nKeyError: 'lr'\n", None),
    ("its traceback was logged", TRACEBACK.format("RuntimeError: CUDA out of memory.") + TRACEBACK.format("KeyError: 'lr'"), None),
    ("a line of source", "Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\n"
     "    raise ValueError(1)  # not a CUDA out of memory\nValueError: 1\n", None),
    ("another exception while it was handled", TRACEBACK.format("RuntimeError: CUDA out of memory.")
     + "\nDuring handling of the above exception, another exception occurred:\n\n" + TRACEBACK.format("KeyError: 1"),
     "RuntimeError: CUDA out of memory."),
    ("one rank of torchrun's", "[rank1]: " + TRACEBACK.format("[rank1]: torch.OutOfMemoryError: CUDA out of memory.")
     + TRACEBACK.format("DistBackendError: aborted") + TRACEBACK.format("torch.distributed.elastic.multiprocessing.errors."
     "ChildFailedError: "), "[rank1]: torch.OutOfMemoryError: CUDA out of memory."),
    ("no rank of torchrun's", "CUDA out of memory, skipped\n" + TRACEBACK.format("KeyError: 1")
     + TRACEBACK.format("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "), None),
    ("the host's memory is another", "MemoryError\nKilled\n", None), ("numpy's, too", "numpy.core._exceptions._ArrayMemoryError: Unable to "
     "allocate 8 GiB", None), ("nothing", "", None),
]


@pytest.mark.parametrize("reason, text, line", OOMS, ids=[case[0] for case in OOMS])
def test_the_line_that_says_out_of_memory(reason, text, line):
    cause = nexus.find_cause(job(), nexus.Result(1), nexus.Evidence(text), None)
    assert cause == ("cuda-oom", line) if line else cause[0] == "exit", reason
    assert nexus.find_cause(job(gpus=0.0), nexus.Result(1), nexus.Evidence(text), None)[0] == "exit", "it has no GPU"


LAST_LINES = [  # reason, text, its last two lines
    ("in their order", "a\n\nValueError: x\n", ["a", "ValueError: x"]),
    ("a progress bar as it was last", "10%\r50%\r100%\nb", ["100%", "b"]), ("one that ends with its return", "10%\r50%\r", ["50%"]),
    ("cut", "x" * 500, ["x" * 179 + "…" + "x" * 120]), ("without colours and titles", "\x1b[31merror\x1b[0m\x1b]0;a title\x07", ["error"]),
    ("a line is what a newline ends", "a\x0cb\u2028c\r\n", ["a b c"]),
]


@pytest.mark.parametrize("reason, text, lines", LAST_LINES, ids=[case[0] for case in LAST_LINES])
def test_find_last_lines(reason, text, lines):
    assert nexus.find_last_lines(text, 2) == lines, reason


@given(texts | st.lists(texts, max_size=5).map("\n".join))
def test_a_line_of_a_log_is_one_harmless_line(text):
    evidence = nexus.Evidence(text + "CUDA out of memory" + text)
    for line in (*nexus.find_last_lines(text, 3), nexus.find_cause(job(), nexus.Result(1), evidence, None)[1]):
        assert line == line.strip() and (0 < len(line) <= 300 and not re.search(nexus.CONTROL, line))


OLD_WORDS = ('/h/logs/job_abc/job.sh: line 15:   565 Aborted                 NEXUS_JOB_NONCE="${attempt:+cafe}" KEY=\'a\nhush\' '
             '/usr/bin/env -u _ -- PATH=/hush "$@" bash -c \'x\ny\'')
CAUSES = [  # reason, the end of stderr, the line that may be the cause
    ("the program's own line", "terminate called: NCCL timeout\n", "terminate called: NCCL timeout"),
    ("bash", "NaN\nbash: line 1:   565 Aborted                 (core dumped) python x.py\n", "NaN"),
    ("a script", "NaN\n/a b/run.sh: line 12: 12345 Killed                  python x.py\n", "NaN"),
    ("a word without room", "NaN\nbash: line 1:  9303 Floating point exceptionpython x.py\n", "NaN"),
    ("without a line", "NaN\nbash:  9398 Aborted                 (core dumped) python x.py\n", "NaN"),
    ("another language", "NaN\nbash: Zeile 1:   565 Abgebrochen             (Speicherabzug geschrieben) python x.py\n", "NaN"),
    ("dash", "NaN\nSegmentation fault (core dumped)\n", "NaN"), ("dash, alone", "Killed\n", None),
    ("zsh", "NaN\nzsh:1: segmentation fault (core dumped)  python x.py\n", "NaN"),
    ("fish", "NaN\nfish: Job 1, 'python x.py' terminated by signal SIGABRT (Abort)\n", "NaN"),
    ("timeout", "NaN\ntimeout: the monitored command dumped core\n", "NaN"),
    ("what a shell itself finds", "bash: line 1: nope: command not found\n", "bash: line 1: nope: command not found"),
    ("a number after a colon", "data.csv: line 12: 5 fields expected\n", "data.csv: line 12: 5 fields expected"),
    ("a word of the kind", "Aborted by the watchdog\n", "Aborted by the watchdog"),
    ("tqdm, drawn anew", "NaN\n\r  0%|          | 0/9 [00:00<?, ?it/s]\r 45%|####5     | 4/9 [00:10<00:12,  1.13s/it]\n", "NaN"),
    ("in a file", "NaN\nEpoch 1:  45%|\u2588\u2588\u258c  | 9/20 [00:10<00:12,  1.1s/it, loss=0.3]\n", "NaN"),
    ("without a total", "NaN\ntrain: 9it [00:10,  1.13s/it]\n", "NaN"),
    ("an error behind a bar", "\r 45%|###   | 9/20 [00:10<00:12,  1.1s/it]RuntimeError: NaN\n", "RuntimeError: NaN"),
    ("a bar that was cleared away", "\r 45%|###   | 9/20 [00:10<00:12]\r          \rRuntimeError: NaN\n", "RuntimeError: NaN"),
    ("another bar", "NaN\nstep 1\rstep 2\rstep 3\n", "NaN"), ("Windows", "NaN\r\n", "NaN"),
    ("job.sh, formerly", f"NaN\n{OLD_WORDS}\n", "NaN"), ("the end of that", OLD_WORDS[60:] + "\n", None),
    ("nearly all of it", OLD_WORDS.partition("PATH=")[2], None),
]


@pytest.mark.parametrize("reason, text, line", CAUSES, ids=[case[0] for case in CAUSES])
def test_which_line_is_the_cause(reason, text, line):
    for code, signal, cause in ((134, 6, "signal"), (1, None, "exit")):
        assert nexus.find_cause(job(), nexus.Result(code), nexus.Evidence(text), signal) == (cause, line)
        evidence = nexus.Evidence(text, stdout="loss 0.1\nerror: no such file\n  1%|#  | 1/9 [00:00<00:09]\n")
        printed = "error: no such file" if cause == "exit" else None
        assert nexus.find_cause(job(), nexus.Result(code), evidence, signal) == (cause, line or printed), "of stdout else"
    assert "hush" not in " ".join(nexus.find_last_lines(text, 5))


LONG = ("/job.sh: a 1: 1 ", "NEXUS_JOB_NONCE=/job.sh: a 1: 1 ", "1it [1:1: ", "1%|", "\n", "\r", "Killed\n", "1%||\n", "\x1b]",
        ": 1: 1 Killed  ", "[rank0]: \n")


@pytest.mark.parametrize("piece", LONG)
def test_a_long_log_is_read_in_a_time_that_grows_with_it(piece):
    """The service reads those of all jobs that end together, and does nothing else meanwhile."""
    evidence, began_s = nexus.Evidence(piece * (2**18 // len(piece))), time.process_time()
    nexus.find_cause(job(), nexus.Result(1), evidence, None)
    assert time.process_time() - began_s < 1.5
