"""Whether jaxdist and llama.cpp find the same model in a GGUF file.

python scripts/compare_llamacpp.py MODEL.gguf [--llama-python PYTHON] [--prompts 20] [--tokens 24]

MODEL is what scripts/fetch_model.sh fetches, or another. jaxdist writes it again as F32, and both
continue prompts with the likeliest tokens of that file, where they must agree or tie. MODEL itself,
whose packed weights llama.cpp multiplies with rounded activations, is compared by its perplexity of
the bundled text. PYTHON is an interpreter that has llama-cpp-python.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import UsageError, one_line_errors
from jaxdist.data.sources import EMBEDDED_FOLDER
from jaxdist.data.tokenizer import load_tokenizer
from jaxdist.interop.gguf.file import GGUFFile, open_gguf
from jaxdist.interop.gguf.write import write_gguf
from jaxdist.interop.source import load_parameters
from jaxdist.models import Transformer

WORKER = Path(__file__).with_name("llamacpp_worker.py")
WINDOW = 512  # tokens, each window being scored from its own start
TEXT = "macbeth.txt"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village,",
    "def fibonacci(n):\n",
    "The three primary colors are",
    "Water boils at a temperature of",
    "My favourite season is autumn, because",
    "The first president of the United States was",
    "To make a cup of tea, first",
    "1, 2, 3, 4, 5,",
    "In 1969, two astronauts",
    "A good friend is someone who",
    "The opposite of hot is",
    "import numpy as np\n\nx = np.",
    "Shakespeare wrote many plays, such as",
    "Dear Sir or Madam,",
    "The sun rises in the",
    "Photosynthesis is the process by which",
    "Q: What is 7 times 8?\nA:",
    "The largest animal on earth is",
    "He opened the old wooden door and",
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was found; pairs are (jaxdist's, llama.cpp's)."""

    prompts: int
    gaps: list[float]  # where tokens first part: our logit of our token less that of theirs
    logit_difference: float  # the largest, over the first prompt
    perplexity_f32: tuple[float, float]
    perplexity_packed: tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=24, help="to continue each prompt with")
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens of text")
    parser.add_argument("--json", action="store_true", help="print the figures for a program")
    options = parser.parse_args()
    with one_line_errors("compare_llamacpp"):
        _has_llama_cpp(options.llama_python)
        figures = compare(
            options.model, options.llama_python, options.prompts, options.tokens, options.windows
        )
    if options.json:
        print(json.dumps(asdict(figures)))
        return
    print(f"greedy tokens on F32: {figures.prompts - len(figures.gaps)} of {figures.prompts} equal")
    for gap in figures.gaps:
        print(f"  one parts where our two best logits differ by {gap:.2e}")
    print(f"largest difference of logits: {figures.logit_difference:.2e}")
    for name, (ours, theirs) in (
        ("F32", figures.perplexity_f32),
        ("as given", figures.perplexity_packed),
    ):
        change = 100 * (ours / theirs - 1)
        print(f"perplexity, {name}: {ours:.4f}, llama.cpp {theirs:.4f} ({change:+.3f} %)")


def compare(
    model: Path, llama_python: str, num_prompts: int, num_tokens: int, num_windows: int
) -> Figures:
    """Run both on the same prompts and text."""
    tokenizer = load_tokenizer(str(model))
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS[:num_prompts]]
    text = tokenizer.encode((EMBEDDED_FOLDER / TEXT).read_text()[: 8 * WINDOW * num_windows])
    windows = np.array(text[: num_windows * WINDOW]).reshape(num_windows, WINDOW)
    with tempfile.TemporaryDirectory() as folder:
        request = {"prompts": prompts, "tokens": num_tokens, "windows": windows.tolist()}
        ask = partial(_ask, llama_python, Path(folder), request)
        packed = open_gguf(model)
        metadata = packed.header.metadata.items()
        unpacked = Path(folder) / "f32.gguf"
        write_gguf(
            unpacked,
            packed.config,
            packed.weights(),
            gguf_type="f32",
            tokenizer={key: value for key, value in metadata if key.startswith("tokenizer.")},
        )
        theirs, theirs_packed = ask(unpacked), ask(model)
        transformer = _load(open_gguf(unpacked))
    rows = [[*p, *c.tolist()] for p, c in zip(prompts, theirs["continued"], strict=True)]
    batch = np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
    # Theirs are ours too as long as each is the likeliest after those before it.
    logits = _logits(transformer, batch)
    gaps = []
    for prompt, row, row_logits in zip(prompts, rows, logits, strict=True):
        own = row_logits[len(prompt) - 1 : len(row) - 1]
        chosen = np.take_along_axis(own, np.array(row[len(prompt) :])[:, None], axis=1)[:, 0]
        behind = own.max(axis=1) - chosen
        if behind.any():
            gaps.append(float(behind[behind > 0][0]))
    first = len(prompts[0])
    return Figures(
        prompts=len(prompts),
        gaps=gaps,
        logit_difference=float(np.abs(logits[0, :first] - theirs["logits"]).max()),
        perplexity_f32=(_perplexity(transformer, windows), float(np.exp(theirs["losses"].mean()))),
        perplexity_packed=(
            _perplexity(_load(packed), windows),
            float(np.exp(theirs_packed["losses"].mean())),
        ),
    )


def _has_llama_cpp(python: str) -> None:
    """Refuse an interpreter without it, before a model is read.

    Raises:
        UsageError: it says how to name another.
    """
    found = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True)
    if found.returncode != 0:
        raise UsageError(
            f"{python} has no llama-cpp-python; name an interpreter that has it: --llama-python"
        )


def _ask(python: str, folder: Path, request: dict[str, Any], model: Path) -> Any:
    """The worker's answer about a file."""
    (folder / "request.json").write_text(json.dumps({**request, "model": str(model.resolve())}))
    answer = folder / f"{model.stem}.npz"
    command = [python, WORKER, folder / "request.json", answer]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        raise SystemExit(f"llama.cpp's worker failed:\n{ran.stderr[-2000:]}")
    return np.load(answer)


def _load(file: GGUFFile) -> Transformer:
    like = jax.eval_shape(lambda: Transformer(file.config, key=jax.random.key(0)))
    return load_parameters(file, like)


def _logits(model: Transformer, tokens: np.ndarray) -> np.ndarray:
    """After each token of each row, [B, T, V]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(_forward(model, jnp.asarray(tokens), positions))


@jax.jit
def _forward(model: Transformer, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    return model(tokens, positions)


def _perplexity(model: Transformer, windows: np.ndarray) -> float:
    losses = []
    for window in windows:
        scored = jnp.asarray(_logits(model, window[None])[0, :-1])
        picked = jnp.take_along_axis(scored, jnp.asarray(window[1:, None]), axis=1)[:, 0]
        losses.append(float(jnp.mean(jax.nn.logsumexp(scored, axis=1) - picked)))
    return float(np.exp(np.mean(losses)))


if __name__ == "__main__":
    main()
