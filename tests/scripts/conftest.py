"""The scripts' own modules can be imported, and the scripts run."""

import pytest

from tests.scripts.programs import SCRIPTS


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(SCRIPTS)
