#!/usr/bin/env bash
# Makes .venv if it is missing and runs the tests; arguments go to pytest:
#   bash scripts/test.sh                  all, about half an hour on two cores
#   bash scripts/test.sh -m "not slow"    the fast part, four to five minutes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/environment.sh .venv test
# A worker keeps neighbouring tests, which share compiled functions, until it runs out of them.
exec .venv/bin/python -m pytest -n 2 --dist worksteal "$@"
