"""Which engines race, on what, and what is asked of the ratio between them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.serving.spec import OWN_TOKENS, EngineSpec, Task

BATCHES = (1, 16, 32)
PROMPT, GENERATED = 32, 128  # tokens
LONG_PROMPT = 512
NUM_CLIENTS = 32
QUICK_BATCHES, QUICK_GENERATED = (1, 16), 32
# Least ratio of our tokens a second to theirs. vLLM's is shown without one.
TARGETS = {
    ("llamacpp", "b1"): 0.65,
    ("llamacpp", "b16"): 1.15,
    ("llamacpp", "b32"): 1.15,
    ("llamacpp", "prefill512"): 1.1,
    ("transformers", "b1"): 1.7,
    ("transformers", "b16"): 1.7,
    ("transformers", "b32"): 1.7,
    ("transformers", "prefill512"): 1.1,
}
PREFIX_TARGET, HTTP_TARGET = 5.0, 0.9
HOST_SHARE_TARGET = 0.05  # of a decode step at batch 16, at most


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender with its task, and the least ratio of our speed to it."""

    spec: EngineSpec
    task: Task
    title: str
    target: float | None = None


@dataclass(frozen=True, kw_only=True)
class Race:
    """Turns of `ours` and of all `others`, in a circle.

    unit: "t/s", or "ms" where the time of a turn is what is looked at.
    """

    name: str
    ours: Entry
    others: tuple[Entry, ...]
    unit: str = "t/s"


@dataclass(frozen=True, kw_only=True)
class Models:
    """The same weights for each: a Hugging Face folder, a GGUF file."""

    folder: str
    gguf: str


def peers(
    models: Models, llama_python: str | None, vllm_python: str | None
) -> tuple[EngineSpec, ...]:
    """Those to race against; None leaves one out."""
    found = [EngineSpec(framework="transformers", model=models.folder)]
    if llama_python is not None:
        found.insert(0, EngineSpec(framework="llamacpp", model=models.gguf, python=llama_python))
    if vllm_python is not None:
        found.append(EngineSpec(framework="vllm", model=models.folder, python=vllm_python))
    return tuple(found)


def races(
    models: Models, others: tuple[EngineSpec, ...], *, mesh: str = "auto", quick: bool = False
) -> Iterator[Race]:
    """All races, with jaxdist on `mesh`; those that share contenders side by side."""
    jaxdist = EngineSpec(framework="jaxdist", model=models.folder, mesh=mesh)
    generated = QUICK_GENERATED if quick else GENERATED
    tasks = {
        f"b{batch}": Task(batch=batch, prompt_tokens=PROMPT, new_tokens=generated)
        for batch in (QUICK_BATCHES if quick else BATCHES)
    }
    tasks["prefill512"] = Task(batch=1, prompt_tokens=LONG_PROMPT, new_tokens=1)
    for name, task in tasks.items():
        yield Race(
            name=name,
            ours=Entry(spec=jaxdist, task=task, title=jaxdist.title),
            others=tuple(
                Entry(
                    spec=spec,
                    task=task,
                    title=spec.title,
                    target=TARGETS.get((spec.framework, name)),
                )
                for spec in others
            ),
        )
    long = LONG_PROMPT + OWN_TOKENS
    hot = Task(batch=1, prompt_tokens=long, new_tokens=1, shared=True)
    cold = Task(batch=1, prompt_tokens=long, new_tokens=1)
    yield Race(
        name="prefix512",
        ours=Entry(spec=jaxdist, task=hot, title="TTFT hot"),
        others=(Entry(spec=jaxdist, task=cold, title="TTFT cold", target=PREFIX_TARGET),),
        unit="ms",
    )
    task = Task(batch=NUM_CLIENTS, prompt_tokens=PROMPT, new_tokens=generated)
    http = replace(jaxdist, framework="http")
    yield Race(
        name=f"http{NUM_CLIENTS}",
        ours=Entry(spec=http, task=task, title=http.title),
        others=(Entry(spec=jaxdist, task=task, title="engine", target=HTTP_TARGET),),
    )
