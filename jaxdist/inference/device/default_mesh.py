"""The mesh of a server: what was asked for, or one accelerator, or the cores of a CPU that pay."""

from jaxdist.config import MeshShape, ModelConfig, UsageError
from jaxdist.config.checks import check_model_on_mesh
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.planner.parameters import layer_parameters
from jaxdist.platform import num_cores

AUTO = "auto"
HELP = "Replicas x stages x tensor parallelism: DPxPPxTP; auto: one accelerator, or a CPU's cores."

# A layer's parameters from which two cores are faster than one at batch 1: its two sums over tp
# take about 0.1 ms, and one core reads 3 million 16-bit numbers in a millisecond.
WORTH_SHARING = 1_000_000
MOST = 8  # devices: sums among many take longer; two were measured


def parse(text: str) -> MeshShape | None:
    """The mesh, None for `auto`."""
    return None if text == AUTO else MeshShape.parse(text)


def mesh_for(asked: MeshShape | None, config: ModelConfig, options: RunnerOptions) -> MeshShape:
    """The mesh to serve this model on."""
    import jax  # after the doors have parsed and refused what they can

    if asked is not None:
        return asked.resolve(jax.device_count())
    if jax.default_backend() != "cpu" or jax.process_count() > 1:
        return MeshShape()
    most = min(num_cores(), jax.device_count(), MOST)
    fitting = [tp for tp in range(1, most + 1) if _pays(config, options, tp)]
    return MeshShape(tp=max(fitting, default=1))


def _pays(config: ModelConfig, options: RunnerOptions, tp: int) -> bool:
    """Whether a product over so many cores takes less time, and the model divides over them."""
    mesh = MeshShape(tp=tp)
    if options.quantization or layer_parameters(config) < WORTH_SHARING:
        return tp == 1  # weights in their file's blocks are laid out for one device
    try:
        check_model_on_mesh(options.served(config, mesh), mesh)
    except UsageError:
        return False
    return True
