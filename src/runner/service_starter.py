import hashlib, json, os, sys
from importlib import util

def has_code(path, digest):
    if not os.path.isfile(path):                        # a FIFO never answers
        return False
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:8] == digest
    except OSError:
        return False

def find_copy(program):
    try:
        with open(os.environ["NEXUS_HOME"] + "/service.json") as file:
            digest = json.load(file)["hash"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    copy = os.environ["NEXUS_HOME"] + f"/cache/nexus-{digest}.py"
    return copy if has_code(copy, digest) and not has_code(program, digest) else None

sys.path += filter(os.path.isabs, sys.argv.pop(1).split(os.pathsep))
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv.pop(1) or None, False
program = sys.argv.pop(1)
copy = find_copy(program) if "NEXUS_HAS_RUN" in os.environ else None
if copy:
    os.environ["NEXUS_CHANGED"], program, sys.pycache_prefix = program, copy, None
spec = util.spec_from_file_location("nexus", program)
sys.modules["nexus"] = nexus = util.module_from_spec(spec)
if not os.fork():
    try:
        spec.loader.get_code("nexus")
    finally:
        os._exit(0)
os.wait()
spec.loader.exec_module(nexus)
sys.pycache_prefix = None
sys.exit(nexus.entry())
