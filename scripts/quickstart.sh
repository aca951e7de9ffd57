#!/usr/bin/env bash
# From nothing but Python 3.11 to a trained model that writes and answers over HTTP: some minutes
# on two cores, once the packages are there. Arguments go to the training:
#   bash scripts/quickstart.sh --train.steps 400
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/environment.sh .venv serve

echo "1. training on Shakespeare, over 8 simulated devices"
.venv/bin/python -m jaxdist.train --config configs/quickstart.yaml --mesh 2x2x2 --simulate "$@"

echo "2. writing with it"
.venv/bin/python -m jaxdist.generate --model runs/quickstart --prompt "ROMEO:" --max-tokens 200 --temperature 0.8

echo "3. serving it, and asking over HTTP"
.venv/bin/python scripts/ask.py --model runs/quickstart --prompt "JULIET:" --max-tokens 60

cat <<'END'
The run lies in runs/quickstart. To go on from here:
  . .venv/bin/activate
  jaxdist serve --model runs/quickstart      # a chat page, and OpenAI's API
  jaxdist train --help
END
