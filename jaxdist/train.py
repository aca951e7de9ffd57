"""`python -m jaxdist.train`: train a model as a config says."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdist import platform
from jaxdist.config import UsageError, one_line_errors
from jaxdist.config.command_line import parse
from jaxdist.config.init_from import Origin


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, choose the platform, train; returns the exit code."""
    with one_line_errors():
        words = sys.argv[1:] if argv is None else argv
        if not words:
            raise UsageError(
                "nothing says what to train; give --config FILE, such as configs/quickstart.yaml, "
                "or options, which --help lists"
            )
        config = parse(words, "jaxdist train", read_origin)
        platform.leave_at_signals()
        if config.simulate:
            platform.simulate_devices(config.mesh_shape.size)
        # JAX is loaded here, after the platform is chosen and the config is known to be right.
        from jaxdist.training.loop import NonFinite, run

        try:
            return run(config)
        except NonFinite as error:
            print(f"jaxdist: error: {error}", file=sys.stderr)
            return 1


def read_origin(init_from: str, run_dir: Path) -> Origin:
    """The model that the run starts from; only such a run loads the room that reads them."""
    from jaxdist.training import model_source

    return model_source.read_origin(init_from, run_dir)


if __name__ == "__main__":
    sys.exit(main())
