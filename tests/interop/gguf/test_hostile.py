"""Damaged files, thousands of them, in a process that may not take memory: an error or a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jaxdist.data.gguf_vocabulary import tokenizer_entries
from jaxdist.data.tokenizer import JsonTokenizer
from jaxdist.interop.gguf.write import write_gguf

# Reads each damaged file as a door would: the config, the tokenizer, every weight.
READER = """
import json, resource, struct, sys, warnings
from collections import Counter
from pathlib import Path
import numpy as np
from jaxdist.config.errors import UsageError
from jaxdist.data.tokenizer import load_tokenizer
from jaxdist.interop.gguf.file import open_gguf

warnings.simplefilter("ignore")  # damaged weights overflow
source, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
good, rng = source.read_bytes(), np.random.default_rng(seed)
victim = source.with_name("damaged.gguf")
head = open_gguf(source).header.tensors["token_embd.weight"].offset
HOSTILE = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)

def damaged() -> bytes:
    data = bytearray(good)
    kind = rng.integers(4)
    if kind == 0:
        return bytes(data[: rng.integers(len(data))])
    for _ in range(1 + rng.integers(4)):
        at = int(rng.integers(head))
        if kind == 1:
            data[at] ^= 1 << rng.integers(8)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", HOSTILE[rng.integers(len(HOSTILE))])
        else:
            data[at : at + 4] = struct.pack("<I", rng.integers(300))
    return bytes(data)

def read(path: Path) -> None:
    file = open_gguf(path)
    file.config, file.types, file.chat_template
    for _, _, weight in file.weights():
        pass

def outcome(function, *arguments) -> str:
    try:
        function(*arguments)
        return "read"
    except UsageError as error:
        assert "\\n" not in str(error) and len(str(error)) < 1500, str(error)
        return "refused"

outcomes = Counter({outcome(read, source): 0, outcome(load_tokenizer, str(source)): 0})
assert list(outcomes) == ["read"], "the undamaged file is not read"
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 192 * 2**20,) * 2)
for _ in range(count):
    victim.write_bytes(damaged())
    outcomes[outcome(read, victim)] += 1
    outcomes["tokenizer " + outcome(load_tokenizer, str(victim))] += 1
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def sound(small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a vocabulary, scaled RoPE and blocks, as widely damaged as it can be."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["<s>"], show_progress=False)
    inner.train_from_iterator(["a rose is a rose is a rose", "to be or not to be"], trainer)
    tokenizer = JsonTokenizer(inner, name="roses", eos_id=0, bos_id=None, fingerprint="")
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = small.config("llama", num_hidden_layers=1, rope_scaling=scaling)
    path = tmp_path_factory.mktemp("hostile") / "sound.gguf"
    entries = tokenizer_entries(tokenizer, chat_template="{{ messages }}")
    write_gguf(path, config, small.weights(config), gguf_type="q4_0", tokenizer=entries)
    return path


def attack(sound: Path, count: int, seed: int) -> dict[str, int]:
    command = [sys.executable, "-c", READER, str(sound), str(count), str(seed)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)


@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_or_read(sound: Path, count: int):
    outcomes = attack(sound, count=count, seed=0)
    assert min(outcomes["refused"], outcomes["tokenizer refused"]) > count // 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_damaged_files(sound: Path, seed: int):
    assert attack(sound, count=5000, seed=seed)["refused"] > 2500
