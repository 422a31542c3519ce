"""What tests of plans share: reasons in words, Slurm's jobs, GPUs of other machines.

    assert started(made) == {"abc": (0,)} and words(one, made) == "GPU 0 runs job abc"
"""

from makers import NOW, config, gpu, job, mig_slice, running

import nexus

LONG_AGO = NOW - 3600
WAITED = {"created_at": LONG_AGO}


def words(one, made, settings=None):
    """Why a job waits, as lists say it."""
    return nexus.format_reasons(nexus.list_reasons(one, None, made, settings or config(), NOW))


def started(made):
    """{job id: GPU indices} of a plan."""
    return {start.job_id: start.gpu_indices for start in made.starts}


def failed_attempt(number, cause="exit", indices=(0,), code=1):
    return nexus.Attempt(number, gpu_indices=tuple(indices), gpu_uuids=tuple(f"GPU-{index}" for index in indices),
                         started_at=NOW - 60, finished_at=NOW - 30, runtime_seconds=30.0, exit_code=code, cause=cause)


ONE_PROCESS = "Exclusive_Process"

MIXED = [mig_slice(0, 40), mig_slice(1, 10), mig_slice(2, 20), gpu(1)]


# Where Slurm places the jobs

def handed(id, number=1, **fields):
    return job(id, number, **{"status": "submitted", "slurm_key": "0123456789ab", "slurm_id": "12", "attempt": 1, **fields})


# Several machines

def there(node, *indices, **fields):
    """GPUs of another machine."""
    return [gpu(index, node=node, uuid=f"{node}/GPU-{index}", **fields) for index in indices]


def running_there(id, node, indices=(0,), **fields):
    return running(id, indices, node=node, gpu_uuids=tuple(f"{node}/GPU-{index}" for index in indices), **fields)


def view(name, **facts):
    return nexus.NodeView(name, **{"cpu_slots": 2, **facts})


TWO = [view("n1"), view("n2")]
BOTH = [*there("n1", 0, 1), *there("n2", 0, 1)]


# Other users of the box, who have services of their own

def want(gpus=1, jobs=1, indices=(0, 1, 2, 3), **facts):
    return nexus.Want(gpus, tuple(f"GPU-{index}" for index in indices), jobs, **{"since": NOW - 600, **facts})


def box_user(name, held=(), wants=(), run_s=30.0, began=NOW - 10, **facts):
    """bob has uid 1, carl 2; ann, whose service this is, 0."""
    holdings = tuple(nexus.Holding(f"GPU-{index}", 100, began) for index in held)
    return nexus.BoxUser(**{
        "uid": ["ann", "bob", "carl"].index(name), "name": name, "wants": tuple(wants), "holdings": holdings, "run_s": run_s,
        "running": len(held), "waiting": sum(one.jobs for one in wants), **facts})


def box(*others, wants=(), held=(), had=None):
    """`wants`, `held`: ann's."""
    return nexus.Box(0, (box_user("ann", held, wants), *others), had or {0: 100.0, 1: 100.0, 2: 100.0})


def held_by(name, *indices):
    return [gpu(index, lease_holder=name) for index in indices]
