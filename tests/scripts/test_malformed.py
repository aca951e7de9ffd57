"""Thousands of malformed requests leave a server alive, its blocks free and its memory flat."""

from pathlib import Path

import pytest

from tests.scripts.programs import module
from tests.server.test_lifecycle import started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to see memory in"),
]


def test_malformed_requests_leave_nothing_behind():
    with started(0, 30) as (process, url):
        found = module("malformed").send_all(url, 3000, pid=process.pid)
    assert not found.faults
    assert sum(found.statuses.values()) == 3000
    assert {0, 200, 400, 404, 405} <= {*found.statuses}


def test_a_leak_would_be_seen():
    with started(0, 30, 100_000) as (process, url):
        found = module("malformed").send_all(url, 600, pid=process.pid)
    (fault,) = found.faults
    assert fault.startswith("memory grew by")
    assert found.growth is not None and found.growth > module("malformed").MOST_GROWTH
