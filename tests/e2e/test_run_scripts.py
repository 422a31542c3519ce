"""Run scripts, in the forms in which researchers publish them, end under nexus as they do in a shell."""

import concurrent.futures
import os
import subprocess

import live

# Stands for every training program: writes its arguments into the folder's file `ran`, and exits with the code of --fail.
TRAIN = r"""
import os, sys, time
time.sleep(0.3)
words = sys.argv[1:]
with open("ran", "a") as ran: ran.write(" ".join([os.path.basename(sys.argv[0]), *words]) + "\n")
print("loss 0.5"); print("a warning", file=sys.stderr)
sys.exit(int(words[words.index("--fail") + 1]) if "--fail" in words else 0)
"""
# Starts a program so often, as torchrun and srun do, and passes on how the first one that failed has ended.
LAUNCH = r"""
import subprocess, sys
count = int(sys.argv[1].partition("=")[2]); command = sys.argv[2:]
made = [subprocess.Popen([*command, f"--rank={rank}"], start_new_session=True) for rank in range(count)]
sys.exit(next(filter(None, [one.wait() for one in made]), 0))
"""

SCRIPTS = [
    ("one program", "#!/bin/bash\ntrain --lr 1e-3\n"),
    ("one that fails", "train --fail 3\n"),
    ("fails, and goes on", "train --fail 3\ntrain --lr 2\n"),
    ("set -e", "set -e\ntrain --fail 3\ntrain --lr 2\n"),
    ("strict", "set -euo pipefail\nLR=${1:-1e-4}\ntrain --lr $LR 2>&1 | tail -n 5\n"),
    ("strict, and fails in a pipe", "set -euo pipefail\ntrain --fail 4 | tail -n 5\necho end\n"),
    ("into tee", "mkdir -p logs\ntrain --fail 5 2>&1 | tee logs/out.txt\n"),
    ("into tee, and its code", "train --fail 5 2>&1 | tee out.txt\nexit ${PIPESTATUS[0]}\n"),
    ("in the background, and waits", "for s in 1 2 3; do\n  train --seed $s &\ndone\nwait\necho all done\n"),
    ("in the background", "for s in 1 2 3; do\n  train --seed $s > log.$s 2>&1 &\ndone\n"),
    ("nohup", "nohup train --lr 1 > nohup.out 2>&1 &\necho $! > pid.txt\n"),
    ("waits for each", "pids=()\nfor s in 0 7; do train --fail $s & pids+=($!); done\n"
     "code=0\nfor pid in ${pids[@]}; do wait $pid || code=$?; done\nexit $code\n"),
    ("a trap at the end", "trap 'rm -rf scratch; echo cleaned >> ran' EXIT\nmkdir scratch\ntrain --fail 2\n"),
    ("a heredoc", "cat > config.yaml <<EOF\nlr: 0.1\nname: $USER_NAME\nEOF\npython3 - <<'EOF'\n"
     "print(open('config.yaml').read(), file=open('ran', 'a'))\nEOF\n"),
    ("loops of loops", "for lr in 1 2; do\n  for bs in 16 32; do\n    train \\\n      --lr $lr \\\n      --bs $bs || exit 9\n"
     "  done\ndone\n"),
    ("like torchrun", "export OMP_NUM_THREADS=1\nlaunch --nproc=2 train --epochs 3 \\\n    --out runs/a\n"),
    ("a rank fails", "launch --nproc=2 train --fail 6\n"),
    ("like accelerate", "CUDA_VISIBLE_DEVICES=0 launch --num_processes=1 train --config a.yaml \"$@\"\n"),
    ("like srun, in the background", "launch --ntasks=1 train --a 1 &\nlaunch --ntasks=1 train --a 2 &\nwait\n"),
    ("a limited time", "timeout 1 sleep 30\necho \"code $?\" >> ran\ntrain\n"),
    ("functions and arrays", "args=(--lr 1 --name 'two words')\nrun() { echo \"+ $*\" >> ran; \"$@\"; }\nrun train \"${args[@]}\"\n"),
    ("resumes until it is done", "n=0\nuntil [ $n -ge 3 ]; do train --resume $n; n=$((n + 1)); done\n"),
    ("reads its list", "while read -r lr; do train --lr \"$lr\" < /dev/null; done < <(printf '1\\n2\\n')\n"),
    ("xargs", "printf '1\\n2\\n3\\n' | xargs -P 3 -I{} train --seed {}\n"),
    ("exec", "cd . && exec train --fail 8\n"),
    ("a signal", "train\nkill -9 $$\n"),
]


def make_folders(base):
    for number, (_, text) in enumerate(SCRIPTS):
        folder = base / str(number)
        folder.mkdir(parents=True)
        (folder / "run.sh").write_text(text)
    return [base / str(number) for number in range(len(SCRIPTS))]


def outcome(folder):
    return sorted(live.read(folder / "ran").splitlines())


def test_run_scripts_end_as_in_a_shell():
    with live.Box(gpus=0, launcher="screen", cpu_slots=30) as box:
        for name, text in (("train", TRAIN), ("launch", LAUNCH)):
            (box.bin / name).write_text(f"#!{box.python} -IS{text}")
            (box.bin / name).chmod(0o755)
        environ = {**os.environ, **box.environ, "USER_NAME": "ann"}
        shell, ours = make_folders(box.path("shell")), make_folders(box.path("ours"))
        ids = [box.add("bash run.sh", cwd=str(folder), gpus=0, env={"USER_NAME": "ann", "PATH": environ["PATH"]}) for folder in ours]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            done = list(pool.map(lambda folder: subprocess.run(["bash", "run.sh"], cwd=folder, env=environ, stdin=subprocess.DEVNULL,
                                                               capture_output=True, text=True), shell))
        for (reason, _), job_id, by_hand, there, here in zip(SCRIPTS, ids, done, shell, ours):
            job = box.wait(job_id)
            assert job["exit_code"] == by_hand.returncode % 256 or job["exit_code"] == 128 - by_hand.returncode, (reason, job)
            live.until(lambda there=there, here=here: outcome(there) == outcome(here), f"the same in {here} as in a shell: {reason}")
            out = box.ask("GET", f"/jobs/{job_id}/logs?stream=stdout")
            assert sorted(out.splitlines()) == sorted(by_hand.stdout.splitlines()), reason
