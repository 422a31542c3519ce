import os, resource, signal, sys

def use_all_cpus():
    for count in (8192, 1024, os.sysconf("SC_NPROCESSORS_CONF")):
        try:
            return os.sched_setaffinity(0, range(count))
        except OSError:
            pass

def reset_by_number():
    import ctypes
    ioprio_set, set_mempolicy = {"x86_64": (251, 238), "aarch64": (30, 237)}[os.uname().machine]
    kernel = ctypes.CDLL(None).syscall
    kernel(ioprio_set, 1, 0, 0)
    kernel(set_mempolicy, 0, None, 0)

def reset_oom_score():
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("0")

def raise_limits():
    for limit in (resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_DATA):
        resource.setrlimit(limit, [resource.getrlimit(limit)[1]] * 2)

for act in (lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)),
            lambda: os.setpriority(os.PRIO_PROCESS, 0, 0), use_all_cpus, reset_by_number, reset_oom_score,
            raise_limits):
    try:
        act()
    except Exception:
        pass                                    # it may not: nexus health tells what stays
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execvp(sys.argv[1], sys.argv[1:])
