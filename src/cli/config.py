"""`nexus config`: what it is, and to edit it."""

from __future__ import annotations

import os

from ..machine.config_file import choose_config, load_config
from ..machine.disk import make_folder, write_atomic
from ..server.endpoint import find_port
from ..values.config import PORTS, format_config, format_sample_config
from ..values.text import refuse
from ..values.value import replace
from .context import Context
from .find_service import find_service
from .transport import DISK


def cmd_config(context: Context) -> None:
    path = choose_config(DISK, context.layout)
    config = load_config(DISK, path, context.environ)
    port = find_port(DISK, context.layout, config.service) or PORTS[0]
    config = replace(config, service=replace(config.service, port=port))
    context.print(f"# {path}" + ("" if os.path.exists(path) else ": there is none; these are the defaults"),
                  *format_config(config).rstrip("\n").split("\n"))


def cmd_config_edit(context: Context) -> int:
    import shlex
    import subprocess
    path = choose_config(DISK, context.layout)
    editor = context.environ.get("VISUAL") or context.environ.get("EDITOR") or "vi"
    make_folder(DISK, os.path.dirname(path))
    if not os.path.exists(path):
        write_atomic(DISK, path, [format_sample_config()])
    try:
        code = subprocess.call([*shlex.split(editor), path])
    except (OSError, ValueError) as error:
        refuse(f"the editor '{editor}' cannot be run: {error}", hint="EDITOR=nano nexus config edit")
    load_config(DISK, path, context.environ)
    if code == 0 and find_service(context.layout):
        context.say("the running service takes it over at its next start: nexus restart (jobs go on)")
    return code
