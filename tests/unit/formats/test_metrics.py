"""The numbers that a line of a job tells, and which line counts."""

import math
import time

import pytest

import nexus

NAN, INF = math.nan, math.inf
# Last lines that programs print: what they tell
TOLD = [
    ("plain", "loss=1.23", {"loss": 1.23}),
    ("keras", "loss: 0.3 - acc: 0.9", {"loss": 0.3, "acc": 0.9}),
    ("Keras 3", "10/10 ━━━━━━━━━━━━━━━━━━━━ 1s 5ms/step - accuracy: 0.9100 - loss: 0.3012 - val_loss: 3.1e-01",
     {"accuracy": 0.91, "loss": 0.3012, "val_loss": 0.31}),
    ("a prefix", "val_loss=0.5", {"val_loss": 0.5}), ("a path of a name", "eval/accuracy: 0.91", {"eval/accuracy": 0.91}),
    ("HF Trainer", "{'loss': 0.1, 'learning_rate': 5e-05, 'epoch': 3.0}", {"loss": 0.1, "learning_rate": 5e-05, "epoch": 3.0}),
    ("HF's summary", "{'train_runtime': 12.3, 'train_samples_per_second': 8, 'train_loss': 0.31, 'epoch': 3.0}",
     {"train_runtime": 12.3, "train_samples_per_second": 8, "train_loss": 0.31, "epoch": 3.0}),
    ("JSON", '{"loss":0.25,"n":3}', {"loss": 0.25, "n": 3}), ("nan", "loss=nan acc: NaN", {"loss": NAN, "acc": NAN}),
    ("inf", "ppl: inf, score=-inf", {"ppl": INF, "score": -INF}), ("exponents", "lr=1e-3 x=1.5E+2", {"lr": 0.001, "x": 150}),
    ("negative", "reward: -12.5", {"reward": -12.5}), ("without a first digit", "acc=.91", {"acc": 0.91}),
    ("a percentage", "val acc: 91.2%", {"val acc": 91.2}), ("with a blank", "accuracy = 91 %", {"accuracy": 91}),
    ("a word before", "Validation loss: 0.32", {"Validation loss": 0.32}),
    ("two words before", "best val acc: 0.9", {"best val acc": 0.9}), ("a sentence", "Done, final loss: 0.3.", {"final loss": 0.3}),
    ("a table's line", "Train loss: 0.31 | Val loss: 0.42", {"Train loss": 0.31, "Val loss": 0.42}),
    ("epochs", "Epoch [3/10], Step [100/200], Loss: 0.32", {"Loss": 0.32}),
    ("tqdm", "100%|███| 9/9 [00:10<00:00, 1.13s/it, loss=0.3, v_num=2]", {"loss": 0.3, "v_num": 2}),
    ("a logger", "INFO:root:loss=0.3", {"loss": 0.3}), ("a time before it", "10:23:45 loss=0.5", {"loss": 0.5}),
    ("torch", "loss: tensor(0.3, grad_fn=<X>)", {"loss": 0.3}), ("numpy 2", "{'acc': np.float64(0.91)}", {"acc": 0.91}),
    ("tight", "loss:0.123", {"loss": 0.123}), ("an error bar", "acc=0.91±0.02", {"acc": 0.91}), ("a mean", "loss=0.3(0.4)", {"loss": 0.3}),
    ("twice", "loss=0.5 loss=0.4", {"loss": 0.4}), ("top 5", "acc@5: 0.99", {"acc@5": 0.99}), ("a tuple", "(loss=0.3)", {"loss": 0.3}),
    ("detection", "mAP50-95: 0.41", {"mAP50-95": 0.41}),
    ("a blank alone", "epoch 3 loss 0.312 val acc 91.2% lr 0.1 took 3.5 s", {"loss": 0.312, "val acc": 91.2}),
    ("a blank and what is no number", "train loss nan, best loss 1e-3", {"train loss": NAN, "best loss": 0.001}),
    ("a blank beside a sign", "epoch 3 loss=0.3", {"loss": 0.3}),
]
NOTHING = [
    ("a time", "done at: 10:23"), ("a time alone", "10:23:45"), ("a date", "date: 2024-10-12"), ("a count", "step 4/10"),
    ("a count of a name", "step: 4/10"), ("an address", "http://host:8080/?a=1&b=2"), ("a port", "listening on localhost:8080"),
    ("a path", "saved /data/lr=0.1/seed=3/model.pt"), ("a file's name", "saved epoch=3-val_loss=0.21.ckpt"),
    ("a name with a blank", "to runs/x lr=0.1/seed=3"), ("a file and a line", "train.py:12"), ("a device", "on cuda:0"),
    ("options", "python train.py --lr=0.1 -n=3"), ("text", "a=b loss=low"), ("hexadecimal", "at=0x10"), ("a version", "torch=2.1.0"),
    ("a unit", "mem=12GB time=3s"), ("a thousand", "samples: 1,234"), ("information", "x: information"),
    ("a warning", "WARNING: 3 were skipped"),
    ("an error", "RuntimeError: 3 of them"), ("an index", "a[3] = x"), ("a count of losses", "loss 3, took 0.3 s"), ("empty", ""),
    ("a range", "n: 3-5"), ("an underscore", "n=1_000"), ("a list", "w=0.1,0.2"), ("a comparison", "loss==0.3"),
    ("a bar", "45%|███| 9/20 [00:10<00:12, 1.13s/it]"), ("an email", "me@host: 3x"), ("a variable", "$x=3"),
]


@pytest.mark.parametrize("reason, line, metrics", TOLD, ids=[row[0] for row in TOLD])
def test_what_a_line_tells(reason, line, metrics):
    found = nexus.read_metrics(line)
    assert list(found) == list(metrics)
    assert all(found[name] == metrics[name] or (math.isnan(found[name]) and math.isnan(metrics[name])) for name in found)


@pytest.mark.parametrize("reason, line", NOTHING, ids=[row[0] for row in NOTHING])
def test_what_is_no_result(reason, line):
    assert nexus.read_metrics(line) == {}


def test_there_are_as_many_lines_without_results():
    assert len(NOTHING) >= 30


@pytest.mark.parametrize("text", ["a" * 50000, "loss" * 20000, "train " * 10000, "a=" * 20000, "a: " * 20000, "x=1" * 20000,
                                  "loss=" + "1" * 50000, "loss=0." + "0" * 50000 + "x", "val val val " * 5000, "'" * 50000])
def test_no_line_takes_long_to_read(text):
    began = time.thread_time()
    nexus.read_metrics(text), nexus.is_bare_bar(text[:5000])
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("name, direction", [
    *((name, "low") for name in ("loss", "val_loss", "Train loss", "eval/loss", "err", "test_err", "ppl", "mse", "rmse", "mae", "wer",
    "fid",
                                 "valLoss", "loss2", "acc_loss", "eval_perplexity")),
    *((name, "high") for name in ("acc", "test/acc", "eval_accuracy", "best val acc", "auc", "f1", "eval_f1", "iou", "mIoU", "map",
    "mAP50-95",
                                  "bleu", "mean_reward", "acc@5", "top1_acc", "accuracy")),
    *((name, None) for name in ("epoch", "lr", "step", "lossy", "account", "mapping", "time", "closs", "f2", "v_num"))])
def test_which_is_better(name, direction):
    assert nexus.find_direction(name) == direction


LINES = [  # reason, lines of the log that grew last and of the other one, the line that counts
    ("last words after it", [["loss=0.5", "loss=0.3", "Done.", "saved to out/epoch=3.ckpt"], []], "loss=0.3"),
    ("Lightning's last words", [["`Trainer.fit` stopped: `max_epochs=3` reached."], ["val_loss: 0.25"]], "val_loss: 0.25"),
    ("the log that grew last", [["loss=0.3"], ["loss=0.5"]], "loss=0.3"), ("a bar", [["50%|##| 1/2 [00:01<00:01, loss=0.5]"]],
     "50%|##| 1/2 [00:01<00:01, loss=0.5]"), ("none", [["Done."], ["epoch 3"], []], None), ("nothing", [], None),
    ("a long one", [["x" * 5000 + " loss=0.3"]], "x" * 1000),
    ("blanks, and what no terminal shows", [["  a=1\x07b c=2.5 "]], "a=1 b c=2.5"),
]


@pytest.mark.parametrize("reason, texts, line", LINES, ids=[row[0] for row in LINES])
def test_which_line_has_the_numbers(reason, texts, line):
    assert nexus.find_metric_line(texts) == line
