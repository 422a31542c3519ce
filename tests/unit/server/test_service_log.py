"""service.log."""

import json
import re

import pytest
from makers import config as make_config

import nexus

# The log


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_service_log_is_rotated_in_its_format(tmp_path, log_format):
    config = make_config(log_format=log_format, log_backups=2)
    layout = nexus.make_layout(str(tmp_path), config)
    log = nexus.make_log(layout, nexus.replace(config.service, log_max_mb=0.001))
    for _ in range(50):
        log.info("Started job %s", "x" * 100, extra={"job_id": "abc"})
    log.handlers[0].close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["service.log", "service.log.1", "service.log.2"]
    for path in tmp_path.iterdir():
        assert 0 < path.stat().st_size <= 1048
        for line in path.read_text().splitlines():
            if log_format == "json":
                assert json.loads(line)["job_id"] == "abc"
            else:
                assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] Started job x{100}", line)
