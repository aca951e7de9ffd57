"""`bench_serve.py engine`: jaxdist's engine and server against engines of others, in turns."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatch
from pathlib import Path

from bench.child import ContenderFailed
from bench.report import machine
from bench.serving.arrivals import Texts
from bench.serving.contenders import start
from bench.serving.plan import HOST_SHARE_TARGET, Models, Race, peers, races
from bench.serving.report import HEADER, Outcome, host_share
from bench.serving.ring import Ring
from bench.serving.spec import EngineSpec

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = REPOSITORY / "models" / "smollm2-135m-instruct.gguf"
TEXT = "macbeth.txt"
HAS = {"llamacpp": "llama_cpp", "transformers": "transformers", "vllm": "vllm"}


def main(argv: Sequence[str]) -> int:
    """Run what was chosen; 1 where a race was invalid, 2 where nothing could be run."""
    options = _parse(argv)
    if not Path(options.model).exists():
        print(f"{options.model} is not there; bash scripts/fetch_model.sh", file=sys.stderr)
        return 2
    about = machine()
    print(f"{about['cores']} cores, {about['processor']}")
    if about["load"] > 0.5:
        print(f"note: the load is {about['load']:.1f}; other work shares the cores")
    if options.quick:
        print("note: quick; shorter answers than the targets are for, and few rounds")
    with _models(options) as models, tempfile.TemporaryDirectory() as caches:
        others = [
            spec
            for spec in peers(models, _python(options.llama_python, "llamacpp"),
                              _python(options.vllm_python, "vllm"))
            if spec.framework != "transformers" or _python(sys.executable, "transformers")
        ]  # fmt: skip
        chosen = [
            race
            for race in races(models, tuple(others), mesh=options.mesh, quick=options.quick)
            if any(fnmatch(race.name, glob) for glob in options.only.split(","))
        ]  # fmt: skip
        if not chosen:
            print(f"--only {options.only} matches no race", file=sys.stderr)
            return 2
        record: dict = {"machine": about}
        cache = Path(caches) if options.starts else None
        if cache is not None:
            record["start_seconds"] = _starts(models, cache)
        ring = Ring(_texts(models), cache)
        outcomes, record["contenders"] = _run(chosen, options.rounds, ring, record)
    if options.json:
        record["outcomes"] = [outcome.to_json() for outcome in outcomes]
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(outcome.problem for outcome in outcomes))


def _run(chosen: list[Race], rounds: int, ring: Ring, record: dict) -> tuple[list[Outcome], dict]:
    """Outcomes, told as they come, and what the contenders said of themselves."""
    outcomes: list[Outcome] = []
    told: set[str] = set()
    print(HEADER, flush=True)
    with ring:
        for race in chosen:
            found = ring.race(race, rounds)
            outcomes += found
            for outcome in found:
                print(outcome.line(), flush=True)
            shares = [share for outcome in found if (share := host_share(outcome)) is not None]
            if race.name == "b16" and shares:
                share = shares[0]
                verdict = "met" if share <= HOST_SHARE_TARGET else "MISSED"
                print(f"{'host share':<11} {share:.1%} of a step at batch 16; "
                      f"target <= {HOST_SHARE_TARGET:.0%}  {verdict}", flush=True)  # fmt: skip
                record["host_share"] = share
            for title in ring.about.keys() - told:
                print(f"  {title}: {_words(ring.about[title])}", flush=True)
            told |= ring.about.keys()
        return outcomes, ring.about


def _starts(models: Models, cache: Path) -> dict[str, float] | None:
    """Seconds until the server is ready, with an empty compilation cache and with a full one."""
    spec = EngineSpec(framework="http", model=models.folder)
    seconds = []
    for _ in range(2):
        try:
            server = start(spec, cache)
        except ContenderFailed as failure:
            print(f"start of the server: not run: {failure}", flush=True)
            return None
        with closing(server):
            seconds.append(server.about["start_seconds"])
    first, second = seconds
    print(f"server ready after {first:.1f} s, with the compilation cache {second:.1f} s "
          f"({first / second:.1f} times as fast)", flush=True)  # fmt: skip
    return {"first": first, "second": second}


@contextmanager
def _models(options: argparse.Namespace) -> Iterator[Models]:
    """The model in bf16 for each engine; made anew unless --work-dir has it."""
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work_dir or Path(temporary)
        models = Models(folder=str(work / "bf16"), gguf=str(work / "bf16.gguf"))
        for target, *how in (
            (models.folder, "--dtype", "bfloat16"),
            (models.gguf, "--gguf-type", "bf16"),
        ):
            if not Path(target).exists():
                work.mkdir(parents=True, exist_ok=True)
                convert = [sys.executable, "-m", "jaxdist.convert", options.model, target, *how]
                subprocess.run(convert, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        yield models


def _texts(models: Models) -> Texts:
    from jaxdist.data.sources import EMBEDDED_FOLDER
    from jaxdist.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(models.folder)
    return Texts(tokenizer.encode((EMBEDDED_FOLDER / TEXT).read_text()))


def _python(python: str, framework: str) -> str | None:
    """The interpreter, if it has the framework; else a line that says so."""
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({HAS[framework]!r}) is None)"
    try:
        if subprocess.run([python, "-c", find], capture_output=True).returncode == 0:
            return python
    except OSError:
        pass
    print(f"note: {python} has no {HAS[framework]}; left out")
    return None


def _words(about: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items())


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_serve.py engine", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer batches, shorter answers, few rounds")
    add("--only", default="*", metavar="GLOBS",
        help="races, comma-separated: b1 b16 b32 prefill512 prefix512 http32")  # fmt: skip
    add("--rounds", type=int, help="turns of each (5; quick: 2)")
    add("--starts", action=argparse.BooleanOptionalAction, default=None,
        help="time two starts of the server, the first without a compilation cache")  # fmt: skip
    add("--mesh", default="auto", help="jaxdist's: replicas x stages x tensor parallelism")
    add("--model", default=str(MODEL), help="what jaxdist.convert reads")
    add("--work-dir", type=Path, metavar="DIR", help="keeps the converted model for the next time")
    add("--llama-python", default=sys.executable, metavar="PATH", help="has llama-cpp-python")
    add("--vllm-python", default=sys.executable, metavar="PATH", help="has vLLM")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (2 if options.quick else 5)
    if options.starts is None:
        options.starts = not options.quick and options.only == "*"
    return options
