"""How many programs this process has compiled: a server that is warm compiles none."""

from jax import monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def num_compilations() -> int:
    """Programs compiled, or read from the persistent cache, since this module was imported."""
    return _count


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _count
    _count += event == _EVENT


monitoring.register_event_duration_secs_listener(_listen)
