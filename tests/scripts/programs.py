"""How tests reach what lies in `scripts/`."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[2] / "scripts"


def module(name: str) -> Any:
    """A module of the scripts' folder."""
    return importlib.import_module(name)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
    """A script, as a user starts it."""
    command = [sys.executable, SCRIPTS / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True)
