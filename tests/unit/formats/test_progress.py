"""What progress bars and counters tell of how far a job is."""

import time

import pytest

import nexus

BAR = "█████     "
# What is printed, one after another, a minute apart: a list of lines; the fraction after the last; seconds left
TOLD = [
    ("tqdm", [f" 45%|{BAR}| 9/20 [08:33<12:18,  1.13s/it]"], 0.45, 738),
    ("tqdm without a description, of hours", [f" 10%|{BAR}| 1000/10000 [1:08:33<10:12:18,  1.13s/it]"], 0.1, 36738),
    ("tqdm that does not know yet", [f"  5%|{BAR}| 1/20 [00:33<?, ?it/s]"], 0.05, None),
    ("tqdm in ASCII", ["train:  50%|#####     | 500/1000 [00:10<00:10, 50.0it/s, loss=0.3]"], 0.5, 10),
    ("tqdm, scaled", [f"data: 50%|{BAR}| 1.50M/3.00M [00:10<00:10, 50.0it/s]"], 0.5, 10),
    ("HF Trainer", [f"  1%|{BAR}| 10/1000 [00:10<16:30,  1.0s/it]", "{'loss': 0.5, 'learning_rate': 5e-05, 'epoch': 0.03}",
                    f"  2%|{BAR}| 20/1000 [00:20<16:20,  1.0s/it]"], 0.02, 980),
    ("HF Trainer, an evaluation between", [
        f" 50%|{BAR}| 500/1000 [00:10<00:10,  50it/s]", f" 50%|{BAR}| 25/50 [00:01<00:01, 25it/s]",
        f"100%|{BAR}| 50/50 [00:02<00:00, 25it/s]"], 0.5, 10),
    ("HF Trainer, after evaluations", [
        f" 50%|{BAR}| 500/1000 [00:10<00:10,  50it/s]", f" 98%|{BAR}| 49/50 [00:01<00:01, 25it/s]",
        f" 51%|{BAR}| 510/1000 [00:12<00:09,  50it/s]"], 0.51, 9),
    ("rich", ["Working... ━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━  45% 0:00:12"], 0.45, 12),
    ("Keras 3", ["Epoch 3/10", "450/900 ━━━━━━━━━━━━━━━━━━━━ 5s 11ms/step - accuracy: 0.9 - loss: 0.3"], 0.25, None),
    ("Keras 3 without bars", ["Epoch 1/4", "1125/1125 - 3s - 3ms/step - loss: 0.0941 - val_loss: 0.0892", "Epoch 2/4",
                              "1125/1125 - 1s - 919us/step - loss: 0.0871 - val_loss: 0.0875", "Epoch 3/4"], 0.5, 240),
    ("Keras 2", ["Epoch 1/2", "450/900 [=============>.....] - ETA: 5s - loss: 0.3"], 0.25, None),
    ("Keras, a whole epoch later", ["Epoch 1/4", "1/10 ━━━━━━━━━━━━━━━━━━━━ 5s 11ms/step",
                                    "10/10 ━━━━━━━━━━━━━━━━━━━━ 1s 11ms/step",
                                    "Epoch 2/4", "5/10 ━━━━━━━━━━━━━━━━━━━━ 1s 11ms/step",
                                    "10/10 ━━━━━━━━━━━━━━━━━━━━ 1s 11ms/step"], 0.5, 252.63),
    ("Lightning's rich bar", ["Epoch 3/9  ━━━━━━━━━━━━━━━━━━━ 450/900 0:00:10 • 0:00:12 41.2it/s"], 2.5 / 9, None),
    ("Ultralytics", [f"      3/100      2.1G      1.215      1.327         16        640:  50%|{BAR}| 50/100 [00:10<00:10, 5.0it/s]"],
     0.025, None),
    ("Ultralytics, newer", ["      3/100      2.1G      1.215      1.327     16    640: 50% ━━━━━━━━━━━━ 50/100 5.0it/s 10.2s<10.1s"],
     0.025, None),
    ("epochs, told at their ends", ["epoch 1/10 loss 0.9", "epoch 2/10 loss 0.8", "epoch 3/10 loss 0.7"], 0.3, 420),
    ("in capitals, in brackets", ["Epoch [2/4], loss: 0.5"], 0.5, None),
    ("steps, in words", ["step 400 of 1000: loss 0.3"], 0.4, None),
    ("a step of an epoch", ["Epoch 2/4 step 50/100 loss 0.3"], 0.375, None),
    ("an epoch, then a bar of it", ["Epoch 2/4", f" 50%|{BAR}| 5/10 [00:05<00:05, 1it/s]"], 0.375, None),
    ("iterations", ["Iter 20/80"], 0.25, None),
    ("batches", ["batch: 3 / 12"], 0.25, None),
    ("epochs told at their ends, with steps", [
        "step 50/100", "step 100/100", "Epoch 1/4 loss 0.3", "step 50/100"], 0.375, None),
    ("a bar of a former epoch once more", [
        "Epoch 1/4", f"100%|{BAR}| 10/10 [00:05<00:00, 1it/s]", "Epoch 2/4", f"100%|{BAR}| 10/10 [00:05<00:00, 1it/s]",
        f" 50%|{BAR}| 5/10 [00:05<00:05, 1it/s]"], 0.375, None),
    ("a validation in an epoch", ["Epoch 3/10", f"100%|{BAR}| 100/100 [00:05<00:00, 1it/s]",
                                  f"  5%|{BAR}| 1/20 [00:05<00:45, 1it/s]"], 0.3, None),
    ("a bar around others", [
        f"epochs:  0%|{BAR}| 0/4 [00:00<?, ?it/s]", f"batches: 100%|{BAR}| 10/10 [00:05<00:00, 1it/s]",
        f"epochs: 25%|{BAR}| 1/4 [00:05<00:15, 5s/it]", f"batches: 10%|{BAR}| 1/10 [00:01<00:09, 1it/s]"], 0.25, 15),
    ("a first bar, and then the one of the training", [
        f"100%|{BAR}| 5/5 [00:05<00:00, 1it/s]", f" 10%|{BAR}| 1/10 [00:05<00:45, 1it/s]"], 0.1, 45),
]
NOTHING = [
    ("a bar that begins anew", [f"100%|{BAR}| 10/10 [00:05<00:00, 1it/s]", f" 10%|{BAR}| 1/10 [00:05<00:45, 1it/s]"]),
    ("so it is from then on", [f"100%|{BAR}| 10/10 [00:05<00:00, 1it/s]", f" 10%|{BAR}| 1/10 [00:05<00:45, 1it/s]",
                               f"90%|{BAR}| 9/10 [00:05<00:45, 1it/s]"]),
    ("Lightning's, which does not say of how many", [f"Epoch 3:  45%|{BAR}| 450/1000 [00:10<00:12, 41.2it/s, v_num=0]"]),
    ("folds, each of ten epochs", ["epoch 10/10", "epoch 1/10"]),
    ("it falls", ["Epoch 3/10 step 5/10", "Epoch 3/10 step 4/10"]),
    ("use of memory", ["GPU mem 41%"]), ("a rank", ["rank 3/8: ready"]), ("ninja", ["[3/8] Building CXX object"]),
    ("Keras, the end of an epoch without bars", ["1125/1125 - 1s - 816us/step - loss: 0.0848 - mae: 0.2510 - val_loss: 0.0866"]),
    ("a share", ["accuracy 93/100"]), ("a per cent", ["val acc: 87%"]), ("a date", ["2024/10/12 loading"]),
    ("a path", ["saved epoch/3/10.pt"]), ("a checkpoint", ["saving checkpoints/epoch-3/10"]),
    ("pip", ["     ━━━━━━━━━━━━━━━━ 1.2/3.4 MB 5 MB/s"]),
    ("more than all", ["epoch 12/10"]), ("of one", ["step 1/1"]), ("bars of one", [f"100%|{BAR}| 1/1 [00:05<00:00, 1it/s]"]),
    ("no total", ["500it [00:10, 50.0it/s]"]), ("an epoch alone", ["epoch 3 loss 0.1"]), ("a step alone", ["step 400: loss 0.3"]),
    ("pytest", ["tests/test_x.py ..... [ 45%]"]), ("a version", ["step 3/10.5"]), ("a table", ["| 3/10 | 45% |"]),
    ("wget", ["model.bin  45%[=====>    ] 1.20G 12.3MB/s eta 12s"]), ("an empty line", [""]),
    ("steps of something else", ["footsteps 3/10"]),
    ("rich without a time", ["Working... ━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━  45% -:--:--"]),
]


def read(lines):
    known = nexus.OutputProgress()
    for number, line in enumerate(lines):
        known = nexus.read_progress(known, line, 1000.0 + 60 * number)
    return known


@pytest.mark.parametrize("reason, lines, fraction, left_s", TOLD, ids=[case[0] for case in TOLD])
def test_bars_and_counters(reason, lines, fraction, left_s):
    found = read(lines)
    assert found.fraction == pytest.approx(fraction)
    assert left_s is None or found.left_s == pytest.approx(left_s, abs=0.1)


@pytest.mark.parametrize("reason, lines", NOTHING, ids=[case[0] for case in NOTHING])
def test_other_numbers_are_none(reason, lines):
    found = read(lines)
    assert (found.fraction, found.left_s) == (None, None)


def test_there_are_as_many_lines_that_say_nothing():
    assert len(NOTHING) >= len(TOLD)


@pytest.mark.parametrize("line, kept", [
    (f" 45%|{BAR}| 9/20 [08:33<12:18,  1.13s/it]", " 45% 9/20 [08:33<12:18,  1.13s/it]"),
    ("450/900 ━━━━━━━━━━━━━━━━━━━━ 5s 11ms/step - loss: 0.3", "450/900 5s 11ms/step - loss: 0.3"),
    ("450/900 [=============>.....] - ETA: 5s", "450/900 - ETA: 5s"), ("loss | 0.3 | x", "loss | 0.3 | x")])
def test_a_line_without_its_bar(line, kept):
    assert nexus.drop_bar(line) == kept


@pytest.mark.parametrize("text", [" ", "1", "━", "|", "1%|", "epoch ", "step 1 ", "1/", "[===", ": 1/2 "])
def test_no_line_takes_long(text):
    """A job may print anything: twice as much takes about twice as long, which a square would not."""
    seconds = []
    for count in (20_000, 80_000):
        line = (text * count)[:count] + "x"
        began = time.process_time()
        nexus.read_progress(nexus.OutputProgress(), line, 0.0)
        nexus.drop_bar(line)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 8 * max(seconds[0], 0.02), seconds


def test_lines_that_are_read_at_once_say_nothing_of_how_fast_it_is():
    """A service that starts reads what was printed before, all within a moment."""
    progress = nexus.OutputProgress()
    for number in range(1, 51):
        progress = nexus.read_progress(progress, f"epoch {number}/100 loss 0.3", 5000.0)
    assert (progress.fraction, progress.left_s) == (0.5, None)
    progress = nexus.read_progress(progress, "epoch 51/100 loss 0.3", 5010.0)
    assert progress.left_s == pytest.approx(490, 0.01)


@pytest.mark.parametrize("reason, texts, line", [
    ("a line", ["a\nb\n"], "b"), ("nothing", ["", ""], None),
    ("a bar after it", ["loss=0.3\n100%|███| 9/9 [00:10<00:00, 1.1s/it]\n"], "loss=0.3"),
    ("a bar that tells", ["a\n100%|███| 9/9 [00:10<00:00, 1.1s/it, loss=0.3]\n"], "100%|███| 9/9 [00:10<00:00, 1.1s/it, loss=0.3]"),
    ("a bar in the other log", ["100%|███| 9/9 [00:10<00:00, 1.1s/it]\n", "acc=0.9\n"], "acc=0.9"),
    ("bars alone", ["50%|█  | 1/2 [00:10<00:10, 1.1s/it]\n100%|███| 2/2 [00:10<00:00, 1.1s/it]\n"], "100%|███| 2/2 [00:10<00:00, 1.1s/it]"),
    ("Keras", ["x\n10/10 ━━━━━━━━━━━━━━━━━━━━ 1s 5ms/step - loss: 0.3\n"], "10/10 ━━━━━━━━━━━━━━━━━━━━ 1s 5ms/step - loss: 0.3"),
    ("rich", ["saved\nWorking ━━━━━━━━━━━━━━━━━━━━━━ 100% 0:00:12\n"], "saved"),
    ("empty lines", ["a\n\n  \n"], "a")])
def test_the_last_line_that_says_something(reason, texts, line):
    assert nexus.find_telling_line(texts) == line
