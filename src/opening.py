#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = ["psutil", "tomli; python_version < '3.11'"]
# ///
"""nexus: a job queue for the GPUs of one machine or of many, in one file.

    python3 nexus.py add "python train.py"     queue a job; it runs on the next GPU that is truly free
    python3 nexus.py                           what runs where, what waits
    python3 nexus.py logs -f ID                what it prints
    python3 nexus.py node add me@gpu2          its GPUs too, by ssh
    python3 nexus.py install                   put `nexus` on PATH
    python3 nexus.py help                      everything else

The first command starts a service, which decides what runs; every job is kept alive, logged and judged by a script
of its own, so that the service may be killed at any moment.  All that must last is in ~/.nexus (NEXUS_HOME moves it).

As a library: `import nexus; nexus.Client.find().add("python train.py")`.

One self-contained module: copy it, run it.  To change it in its repository, edit src/ and run build.py, which joins the
rooms there; `grep '^# ====' nexus.py` lists them, and each uses only those above it.  Edits here work too, until the
next build.
"""

from __future__ import annotations

__version__ = "1.0.0"

# Imports that `nexus add` does not need are local to where they are used: it may take four times as long as
# `python3 -c pass`, and typing, dataclasses, subprocess and http.client cost it 12, 12, 15 and 35 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeVar

    from .values.value import Value

    T = TypeVar("T")
    AnyValue = TypeVar("AnyValue", bound="Value")
    Schema = Mapping[str, Any]
    Json = Mapping[str, Any]                    # an object of the API
