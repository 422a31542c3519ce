"""service.log, and the log as JSON lines."""

from __future__ import annotations

import os
import time

from ..formats.codec import encode_json
from ..machine.layout import Layout
from ..opening import TYPE_CHECKING
from ..values.config import ServiceConfig

if TYPE_CHECKING:
    import logging


def make_log(layout: Layout, config: ServiceConfig) -> logging.Logger:
    """service.log, rotated.  A full disk only loses lines of it."""
    import logging
    import logging.handlers
    import stat
    logging.raiseExceptions = False

    class LogFile(logging.handlers.RotatingFileHandler):
        """Makes a line once, and writes it at once."""

        def format(self, record: logging.LogRecord) -> str:
            return format_log_json(record) if config.log_format == "json" else super().format(record)

        def emit(self, record: logging.LogRecord) -> None:
            try:
                line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
                self.stream = self.stream or self._open()
                status = os.fstat(self.stream.fileno())
                if 0 < self.maxBytes <= status.st_size + len(line) and stat.S_ISREG(status.st_mode):
                    self.doRollover()
                    self.stream = self.stream or self._open()
                os.write(self.stream.fileno(), line)
            except Exception:
                self.handleError(record)

    handler = LogFile(layout.service_log, maxBytes=int(config.log_max_mb * 2**20), backupCount=config.log_backups,
                      encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging._srcfile = None         # where a line was logged, and by which process,
    logging.logProcesses = logging.logMultiprocessing = False       # nobody reads
    log = logging.getLogger("nexus")
    log.handlers = [handler]
    log.setLevel(config.log_level)
    log.propagate = False
    return log


def format_log_json(record: logging.LogRecord) -> str:
    """One object a line."""
    import logging
    names = ("job_id", "gpu_ids", "required_gpus", "attempt")
    facts = {name: getattr(record, name) for name in names if hasattr(record, name)}
    if record.exc_info:
        facts["traceback"] = logging.Formatter().formatException(record.exc_info)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return encode_json({
        "timestamp": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname, "logger": record.name,
        "thread": record.threadName, "message": record.getMessage(), **facts})
