"""`python -m jaxdist.serve`: OpenAI's API and a chat page in front of a model."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from jaxdist import platform
from jaxdist.config import MeshShape, UsageError, one_line_errors
from jaxdist.config.options import parse_options

if TYPE_CHECKING:
    from jaxdist.server.options import Options
    from jaxdist.server.service import Model
    from jaxdist.training.model_source import ModelSource

# Tokens of an answer whose request names no most: to the end of a context of thousands a CPU would
# be busy for ten minutes with a text that has lost its thread.
MOST_ON_A_CPU = 1024

_PACKAGES = ("fastapi", "uvicorn", "jinja2", "prometheus_client", "llguidance")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, load, serve until a signal; returns the exit code."""
    with one_line_errors():
        missing = [name for name in _PACKAGES if find_spec(name) is None]
        if missing:
            raise UsageError(
                f"serving needs the package {missing[0]}; pip install 'jaxdist[serve]'"
            )
        from jaxdist.server.options import Options, check_words

        words = sys.argv[1:] if argv is None else argv
        check_words(words)
        serve(parse_options(Options, words, "jaxdist serve"))
    return 0


def serve(options: "Options") -> None:
    """Serve. UsageError where something is wrong; all that can be is checked before loading."""
    platform.leave_at_signals()
    mesh, runner, server = options.mesh_shape, options.runner(), options.server()
    options.engine()
    options.template()
    if options.simulate:
        platform.simulate_devices(mesh.size if mesh else platform.num_cores())
    elif mesh is None:
        platform.a_device_a_core()
    platform.compilation_cache()
    # JAX is loaded here, after the platform is chosen and the options are known to be right.
    from jaxdist.inference.device.default_mesh import mesh_for
    from jaxdist.server.lifecycle import open_socket, run
    from jaxdist.server.service import Service
    from jaxdist.training.model_source import open_model

    source = open_model(options.model)
    if source.tokenizer is None:
        raise UsageError(f"--model {options.model} has no tokenizer; put its tokenizer.json there")
    mesh = mesh_for(mesh, source.config, runner)
    if runner.quantization is not None:
        source.check_packed(mesh)
    runner.check(source.config, mesh)
    sock = open_socket(options.host, options.port)
    log = logging.getLogger("jaxdist.server")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
    log.propagate = False  # a line is JSON and nothing else
    run(Service(server), sock, lambda: load(options, source, mesh))


def load(options: "Options", source: "ModelSource", mesh: MeshShape) -> "Model":
    """Read the weights and compile, with a bar that says how far it is."""
    import jax
    from rich.console import Console
    from rich.progress import Progress

    from jaxdist.data.tokenizer import load_tokenizer
    from jaxdist.inference.async_engine import AsyncEngine
    from jaxdist.inference.load import load_engine
    from jaxdist.inference.sampling.generation_config import described, sampling_defaults
    from jaxdist.server.chat import Chat
    from jaxdist.server.service import Model
    from jaxdist.server.token_text import TokenText

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    tokenizer = load_tokenizer(str(source.tokenizer))
    files, engine_options = source.companions(), options.engine()
    chat = Chat(tokenizer, files, template=options.template())
    defaults = sampling_defaults(files) if options.generation_config == "auto" else {}
    if defaults:
        print(described(defaults), flush=True)
    most = defaults.pop("max_tokens", None)
    if most is None and jax.default_backend() == "cpu":
        most = MOST_ON_A_CPU
    if engine_options.default_max_tokens is None:
        engine_options = replace(engine_options, default_max_tokens=most)
    print(
        f"loading {options.model} on mesh {mesh} and compiling, which takes longest the first time",
        flush=True,
    )
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the weights", total=None)
        engine = load_engine(
            source,
            mesh=mesh,
            runner_options=options.runner(),
            engine_options=engine_options,
            tokenizer=tokenizer,
            progress=lambda done, of, name: bar.update(
                task, completed=done, total=of, description=f"compiling {name}"
            ),
        )
        programs = f"{bar.tasks[0].total:.0f} programs in {bar.tasks[0].elapsed:.0f} s"
    print(f"{getattr(engine.runner, 'pool', '')}; compiled {programs}", flush=True)
    text_of = TokenText(tokenizer)
    return Model(
        engine=AsyncEngine(engine),
        tokenizer=tokenizer,
        chat=chat,
        text_of=text_of,
        defaults=defaults,
    )


if __name__ == "__main__":
    sys.exit(main())
