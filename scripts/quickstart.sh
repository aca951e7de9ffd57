#!/usr/bin/env bash
# From nothing but Python 3.11 to a trained model that writes and answers over HTTP: about three
# minutes on two cores, once the packages are there. Arguments go to the training:
#   bash scripts/quickstart.sh --train.steps 400
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/environment.sh .venv serve
.venv/bin/python -m jaxdist.train --config configs/quickstart.yaml --mesh 2x2x2 --simulate "$@"
.venv/bin/python -m jaxdist.generate --model runs/quickstart --prompt "ROMEO:" --max-tokens 200 --temperature 0.8
.venv/bin/python scripts/ask.py --model runs/quickstart --prompt "JULIET:" --max-tokens 60
