"""Which contenders meet, and what is asked of the ratio between them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.spec import Shape, Spec

SHAPES = {
    # For trying the script out; its figures mean nothing.
    "tiny": Shape(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        rows=4,
        length=32,
    ),
    "15m": Shape(
        vocab_size=32000,
        hidden_size=288,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        rows=8,
        length=256,
    ),
    # SmolLM2-135M.
    "135m": Shape(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rows=2,
        length=512,
    ),
}
# As the 15M shape, with layers and heads that four stages and four tensor-parallel devices divide.
PARTITIONED = replace(
    SHAPES["15m"], num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, rows=32
)
NUM_MICROBATCHES = 16
SHALLOW, DEEP = 4, 32  # layers


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two contenders and the ratio between them.

    By "speed" the ratio is subject / reference of tokens a second and `target` is its least value;
    by "time" it is subject / reference of seconds and `target` is its greatest.
    """

    name: str
    subject: Spec
    reference: Spec
    by: str = "speed"
    target: float | None = None
    steps: int = 1  # in a turn

    def met(self, ratio: float) -> bool | None:
        """Whether `ratio` reaches the target; None where there is none."""
        if self.target is None:
            return None
        return ratio >= self.target if self.by == "speed" else ratio <= self.target


def comparisons(deepspeed_python: str = "", steps: int | None = None) -> Iterator[Comparison]:
    """All of them, those with the same subject side by side; `steps` replaces each one's own."""
    for comparison in _comparisons(deepspeed_python):
        own = steps is None or comparison.subject.job == "compile"
        yield comparison if own else replace(comparison, steps=steps)


def _comparisons(deepspeed_python: str) -> Iterator[Comparison]:
    for name in SHAPES:
        for precision in ("bf16", "fp32"):
            yield from _against_torch(name, precision)
            yield _against_deepspeed(name, precision, deepspeed_python)
    yield from _overhead()
    yield _compile_time()


def _against_torch(name: str, precision: str) -> Iterator[Comparison]:
    shape, steps = SHAPES[name], 2 if name == "135m" else 4
    ours = Spec(framework="jaxdist", shape=shape, precision=precision)
    targets = {
        ("15m", "bf16", "eager"): 1.25,
        ("15m", "bf16", "compile"): 1.0,
        ("15m", "fp32", "eager"): 1.0,
        ("135m", "bf16", "eager+alloc"): 1.0,
        ("135m", "fp32", "eager+alloc"): 1.0,
    }
    for kind in ("eager", "eager+alloc", "compile", "compile+alloc"):
        peer = replace(
            ours,
            framework="torch",
            compiled=kind.startswith("compile"),
            keep_freed_memory=kind.endswith("+alloc"),
        )
        yield Comparison(
            name=f"{name}/{precision}/{kind}",
            subject=ours,
            reference=peer,
            target=targets.get((name, precision, kind)),
            steps=steps,
        )


def _against_deepspeed(name: str, precision: str, python: str) -> Comparison:
    shape = SHAPES[name]
    ours = Spec(framework="jaxdist", shape=shape, precision=precision, mesh="2x1x1")
    return Comparison(
        name=f"{name}/{precision}/deepspeed",
        subject=ours,
        reference=replace(ours, framework="deepspeed", mesh="1x1x1", python=python),
        target=1.3 if name == "15m" else None,
        steps=2 if name == "135m" else 4,
    )


def _overhead() -> Iterator[Comparison]:
    """The cost of partitioning: simulated devices share the cores, so ideal is 1."""
    whole = Spec(
        framework="jaxdist", shape=PARTITIONED, precision="bf16", num_microbatches=NUM_MICROBATCHES
    )
    for mesh, target in (("1x4x1", 1.35), ("1x1x4", 1.5)):
        yield Comparison(
            name=f"overhead/{mesh}",
            subject=replace(whole, mesh=mesh),
            reference=whole,
            by="time",
            target=target,
        )


def _compile_time() -> Comparison:
    def compiling(num_layers: int) -> Spec:
        shape = replace(SHAPES["15m"], num_hidden_layers=num_layers)
        return Spec(framework="jaxdist", shape=shape, precision="bf16", job="compile")

    return Comparison(
        name="compile_time",
        subject=compiling(DEEP),
        reference=compiling(SHALLOW),
        by="time",
        target=1.2,
    )
