"""The table of commands."""

from __future__ import annotations

from ..machine.config_file import choose_config
from ..server.routes import PARAMETERS, STREAMS
from ..values.choice import CANCEL_KEYS, LIVE_FLAGS
from ..values.config import JobsConfig, format_sample_config
from ..values.schema import integer_in, number_in
from ..values.submission import JOB_FIELDS
from ..values.value import Field
from ..views.api_json import JOB
from ..views.usage import USAGE
from .attach import cmd_attach, cmd_screens
from .change import cmd_clear, cmd_dismiss, cmd_edit, cmd_end, cmd_move, cmd_pause, cmd_retry
from .config import cmd_config, cmd_config_edit
from .context import Subcommand, argument
from .control import cmd_agent, cmd_health, cmd_open, cmd_serve, cmd_start, cmd_stop
from .install import cmd_complete, cmd_help, cmd_install
from .lists import cmd_history, cmd_jobs, cmd_queue, cmd_results, cmd_show, cmd_status, cmd_usage, cmd_why
from .logs import cmd_logs, cmd_metrics
from .nodes import cmd_node_add, cmd_node_list, cmd_node_remove
from .options import (
    CHANGE_OPTIONS,
    CHANGED,
    CHOSEN,
    DRY_RUN,
    HELD,
    JOB_OPTIONS,
    JSON_OPTION,
    LINES,
    NUMBER_OPTION,
    READ,
    SERVICE_OPTIONS,
    SINCE,
    filter_option,
    filter_options,
    table_options,
)
from .restart import cmd_restart
from .run import cmd_run, cmd_wait
from .submit import cmd_add, read_sweep
from .tokens import cmd_token_create, cmd_token_list, cmd_token_revoke
from .top import cmd_top
from .transport import DISK

COMMANDS = (
    Subcommand("status", "what runs where, and what waits (nexus alone does the same)", cmd_status, (
        argument("--watch", action="store_true", help="nexus top"), JSON_OPTION,
        argument("--detailed", action="store_true", help="queue by priority, readings of GPUs and host, health"))),
    Subcommand(
        "top", "a live table: GPUs with their jobs, and what waits; q ends it", cmd_top, (),
            "It is status --watch, too. "
            "Up and down choose a job; Enter shows it, l follows its log, x stops it or takes it out of the queue, p "
            "holds or releases it, r runs it again; / shows only jobs with a text, until Esc. Without a terminal it is "
            "printed once."),
    Subcommand("add", "queue a job; prints its id", cmd_add, (*JOB_OPTIONS, JSON_OPTION),
            "The job runs on the next GPU that is truly free, with this directory, environment and umask. A script may "
            "begin with lines like: #NEXUS --gpus 2 --timeout 2h; #SBATCH lines are read too. No copy of it is made: "
            "the job runs what the file holds when it starts (--snapshot keeps a git work tree as it is).",
            examples=(
                'add "python train.py --lr 0.1"',
                'add --gpus 2 --timeout 2h --name baseline "torchrun train.py"',
                'add --sweep lr=0.1,0.01 --sweep seed=0..4 --group exp1 "python train.py --lr {lr} --seed {seed}"',
                'add --after abc "python eval.py"',
                'add --after-group exp1 "python report.py"',
                "add job.sh",
                "add --file commands.txt")),
    Subcommand("run", "queue a job, show its output, exit with its exit code", cmd_run, JOB_OPTIONS,
            "Ctrl-C ends only this display; the job goes on.  What is piped to `run` does not reach the job: its input "
            "is empty, or what is typed in its terminal (nexus attach).  With --tty, at a terminal, the job is "
            "interactive: keys and Ctrl-C go to the program, and Ctrl-A D leaves it running.",
            examples=(
                'run "python train.py"', "run --tty bash",
                'run --gpus 0 "python prepare.py" && nexus add "python train.py"')),
    Subcommand("queue", "pending jobs in the order they would start, and why they wait", cmd_queue, (
        NUMBER_OPTION, *filter_options("status"), *table_options(JOB))),
    Subcommand("history", "finished jobs", cmd_history, (
        NUMBER_OPTION, *READ, *table_options(JOB)),
            examples=("history --since 24h", "history --status failed", "history --since 30d --csv")),
    Subcommand("jobs", "all jobs kept", cmd_jobs, (NUMBER_OPTION, *filter_options(), *table_options(JOB)),
            examples=("jobs --status running,pending", "jobs --name 'lr=0.1*' --json",
                      "jobs --columns id,result,peak_gpu_mem_mib,command")),
    Subcommand("show", "all that is known of jobs", cmd_show, (*READ, JSON_OPTION)),
    Subcommand("why", "why jobs wait, GPU by GPU", cmd_why, (*READ, JSON_OPTION)),
    Subcommand("wait", "wait for jobs; exit with the first exit code that is not 0", cmd_wait, (
        *CHOSEN,
        argument("--any", action="store_true", help="return when the first of them has finished, with its exit code")),
            examples=("wait --group exp1", "wait --any abc abd")),
    Subcommand("logs", "what jobs printed, or the service's log", cmd_logs, (
        argument("ids", nargs="*", metavar="ID|GPU|service", help="jobs (default: the last started), or the service"),
        *filter_options(),
        argument("-f", "--follow", action="store_true",
                 help="follow the output until the jobs end; with --group, also of jobs that join it"),
        argument("-n", "--number", row=LINES, metavar="N",
                 help="the last N lines, of each job; a progress bar as it was last"),
        argument("--grep", metavar="TEXT", row=PARAMETERS["grep"],
                 help="only lines with this text, as it stands; without a capital in it, in any case; exit code 1: "
                 "there are none"),
        argument("-C", "--context", metavar="N", row=PARAMETERS["context"],
                 help="N lines around each that --grep finds"),
        argument("--stream", choices=STREAMS, default="both", help="stdout goes to stdout, stderr to stderr"),
        argument("--timestamps", action="store_true", help="begin each line with the time at which it came")),
            "Of several jobs, each line begins with its job's name.",
            examples=("logs", "logs -f abc", "logs -f --group exp1", "logs abc --grep nan -C 2", "logs service -n 50")),
    Subcommand("kill", "stop running jobs and all they started; returns when they are gone", cmd_end, (
        argument("ids", nargs="*", metavar="ID|GPU"),
        argument("--all", action="store_true", help="with a GPU: all jobs that share it"),
        filter_option("group", "all of this group, pending ones too"),
        *filter_options("group"), DRY_RUN,
        argument("--signal", metavar="NAME", row=CANCEL_KEYS["signal"],
                 help="the first signal, like INT (default: TERM); KILL follows in "
                 f"{JobsConfig.kill_grace_seconds:g} s, or what kill_grace_seconds says")),
            examples=("kill abc", "kill 0", "kill --signal INT abc", "kill --group exp1")),
    Subcommand("cancel", "stop jobs, pending or running", cmd_end, CHOSEN,
            examples=("cancel abc abd", "cancel --name 'lr=0.1*' --dry-run", "cancel --status pending")),
    Subcommand("remove", "take pending jobs out of the queue", cmd_end, CHOSEN),
    Subcommand("retry", "run finished jobs again, as new ones; prints their ids", cmd_retry, (
        *CHANGED, argument("--failed", action="store_true", help="all jobs that failed and were not retried yet"),
        argument("--downstream", action="store_true",
                 help="also the jobs that were cancelled because of them, each after the new ones"),
        argument("--set", metavar="NAME=VALUE", action="append", default=[], type=read_sweep,
                 help="another value of their sweep, in the command, the name and wherever it stands; bs=48,64 "
                 "runs each"),
        JSON_OPTION, *CHANGE_OPTIONS),
            "What filters choose is run again if it failed, or has the --status given, and was not run again yet.  "
            "With options like --gpus 2, the new jobs use these instead of the old values; none, as in --timeout none, "
            "takes one away.  What comes after -- is the command of one job.",
            examples=("retry abc", "retry abc --gpu-mem 20G --timeout 4h", "retry abc --env SEED=2 --cwd ~/exp2",
                      "retry abc -- python train.py --lr 0.01", "retry --failed --dry-run",
                      "retry --group exp1 --failed --set bs=48", "retry abc --downstream")),
    Subcommand("edit", "change pending jobs, or limits and names of running ones", cmd_edit,
            (*CHANGED, *CHANGE_OPTIONS),
            f"Of a running job: {LIVE_FLAGS}.  none takes away what was set.  What comes after -- is the command of "
            "one job.",
            examples=("edit abc --gpus 2 --timeout 4h", "edit abc --after none", "edit --group exp1 --timeout 4h",
                      "edit abc -- python train.py --lr 0.01")),
    Subcommand("dismiss", "take failures off the page's list, and keep them in the history", cmd_dismiss, (
        *CHOSEN, argument("--all", action="store_true", help="all failures"),
        argument("--undo", action="store_true", help="show them again")),
            examples=("dismiss abc", "dismiss --all", "dismiss --group exp1 --undo")),
    Subcommand("clear", "forget finished jobs, with their logs", cmd_clear, (
        *CHOSEN, argument("--all", action="store_true", help="all finished jobs")),
            "Pending and running jobs stay, and what jobs wrote elsewhere.  --dry-run says what it would free.",
            examples=("clear abc", "clear --older 30d --dry-run", "clear --status failed,cancelled")),
    Subcommand("move", "change the places of pending jobs; together they keep their order", cmd_move, (
        *CHOSEN, argument("--first", action="store_true", help="before all others, whatever their priority"),
        argument("--last", action="store_true", help="behind all that wait now"),
        argument("--before", metavar="JOB", help="right before this pending job"),
        argument("--priority", metavar="P", row=JOB_FIELDS["priority"])),
            examples=("move abc --first", "move abc --priority low", "move --group exp1 --before abd")),
    Subcommand("attach", "attach to a running job's screen session (Ctrl-A D leaves)", cmd_attach, (
        argument("ids", nargs="*", metavar="ID|GPU"), *filter_options()), local="attach works"),
    Subcommand("screens", "the screen sessions of nexus", cmd_screens, local="screens are listed"),
    Subcommand("pause", "start nothing new: at all, on a GPU, of a group; hold a pending job", cmd_pause,
            HELD, examples=("pause", "pause 0 1", "pause --group exp1", "pause abc", "pause --name 'lr=0.1*'")),
    Subcommand("resume", "start jobs again", cmd_pause, HELD),
    Subcommand("start", "start the service (any command that needs it does)", cmd_start, SERVICE_OPTIONS,
            local="a service is started"),
    Subcommand("stop", "end the service; running jobs go on", cmd_stop),
    Subcommand("restart", "end the service and start it again; running jobs go on", cmd_restart, SERVICE_OPTIONS,
            local="a service is started"),
    Subcommand("serve", "run the service in the foreground", cmd_serve, SERVICE_OPTIONS),
    Subcommand("agent", "", cmd_agent, (argument("head"),)),
    Subcommand("metrics", "run times of finished jobs, utilization of the GPUs", cmd_metrics, (JSON_OPTION,)),
    Subcommand("usage", "jobs, GPU-hours and failures of each user or group", cmd_usage, (
        SINCE,
        argument("--by", choices=("user", "group"), default="user"),
        *table_options(USAGE, "these columns, in this order: user,gpu_hours; or any keys of --json")),
            examples=("usage --since 30d --by group", "usage --csv")),
    Subcommand("results", "a group's table: values of its sweep, numbers that its jobs print", cmd_results, (
        argument("group", metavar="GROUP"),
        argument("--mean", action="store_true", help="one row for jobs that differ only in their seed: mean ± "
                 "standard deviation, and how many"),
        argument("--over", metavar="KEY", row=PARAMETERS["over"], help="the same, over another value of the sweep"),
        argument("--order", metavar="COLUMN", row=PARAMETERS["order"], help="sort by it, with - in reverse: --order "
                 "-acc; of two of one name, metric.lr or sweep.lr"),
        argument("--csv", action="store_true", help="for a spreadsheet: all rows, seconds, MiB"), JSON_OPTION),
            "What the last line with numbers of a job tells, as name=number or name: number, is a column; of running "
            "jobs too.  Jobs that have completed come first, sorted by the first column of which it is known what is "
            "better, like loss or acc.",
            examples=("results exp1", "results exp1 --mean", "results exp1 --order -acc", "results exp1 --csv")),
    Subcommand("open", "the address of the web page and of the API", cmd_open, (
        argument("--url", action="store_true", help="that alone: curl \"$(nexus open --url)/status\""),)),
    Subcommand("health", "each check with its reading; exit code 1 when one is bad", cmd_health, (JSON_OPTION,)),
    Subcommand("token", "let others in: make a token for a user, list, revoke", cmd_token_list, verbs=(
        Subcommand("create", "make a token; prints it", cmd_token_create, (
            argument("user", metavar="USER"),
            argument("token", nargs="?", metavar="TOKEN", help="default: a random one"),
            argument("--days", metavar="N", row=Field(number_in(1e-9, 36500), like="30"),
                     help="until when it is good; without: until it is revoked"))),
        Subcommand("list", "who has one, and until when", cmd_token_list, (JSON_OPTION,)),
        Subcommand("revoke", "end a token, or all of a user", cmd_token_revoke, (
            argument("token", metavar="USER|TOKEN"),))),
            local="tokens are made",
            examples=("token create ann --days 90", "token list", "token revoke ann")),
    Subcommand("node", "give jobs to other machines too, over ssh: add, list, remove one", cmd_node_list, verbs=(
        Subcommand("add", "bring this nexus there", cmd_node_add, (
            argument("host", metavar="[USER@]HOST|NAME"),
            argument("--name", help="what it is called here (default: its host)"),
            argument("--jump", metavar="[USER@]HOST", help="the machine through which it is reached"),
            argument("--port", row=Field(integer_in(1, 65535), like="22"), help="its sshd's port"),
            argument("--identity", metavar="FILE", help="the private key to log in with"))),
        Subcommand("list", "machines, their GPUs and states", cmd_node_list, (JSON_OPTION,)),
        Subcommand("remove", "give it no more jobs; returns after its last one", cmd_node_remove, (
            argument("name", metavar="NAME"),
            argument("--force", action="store_true", help="at once; the jobs there are given up")))),
            description="Its nexus is this one, copied there; its GPUs and this machine's are one pool.",
            local="nodes are added",
            examples=("node add gpuuser@10.0.0.5 --name n1", "node list", "node remove n1")),
    Subcommand("config", "show the configuration; edit it; its path; a sample", cmd_config, verbs=(
        Subcommand("edit", "open it in your editor", cmd_config_edit),
        Subcommand("path", "where it is", lambda context: context.print(choose_config(DISK, context.layout))),
        Subcommand("sample", "all keys with their defaults", lambda context: context.write(format_sample_config())))),
    Subcommand("install", "put the command `nexus` into ~/.local/bin, with completion", cmd_install, (
        argument("--boot", action="store_true", help="also start the service at boot"),)),
    Subcommand("help", "list the commands of every day, or all others, or explain one", cmd_help, (
        argument("topic", nargs="?", metavar="COMMAND|more"),)),
    Subcommand("complete", "", cmd_complete, (argument("words", nargs="..."),)),
)
