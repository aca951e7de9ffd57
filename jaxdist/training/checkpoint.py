"""Checkpoints: the only module that knows orbax.

A checkpoint `DIRECTORY/<step>` holds the state's arrays under the names of `tree_names`, their
checksums, and a JSON object of the caller (config, data position ...). It appears under that name
only once complete, so a killed save leaves nothing that a later run could take for one. Arrays are
restored onto abstract targets with the shardings of today: mesh, ZeRO stage and process count may
differ from the saver's.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxdist.config import CheckpointConfig, UsageError
from jaxdist.training.checksum import checksums
from jaxdist.training.tree_names import named_leaves, tree_of

_ROOM = "make room, or choose another --output-dir; checkpoints before it are whole"


class Checkpointer:
    """Saves and restores the checkpoints of one directory.

    `config` None opens an existing directory for reading only, which is safe beside a running
    trainer. Errors of disk or content are `UsageError`s that name the directory. All processes
    call the same methods in the same order.
    """

    def __init__(self, directory: str | Path, config: CheckpointConfig | None) -> None:
        self.directory = Path(directory).absolute()
        if config is None and not self.directory.is_dir():
            raise UsageError(f"no checkpoint in {self.directory}: there is no such directory")
        logging.getLogger("absl").addFilter(_not_from_orbax)
        with self._clear_errors("could not be opened"):
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=_options(config),
                item_handlers={
                    "state": ocp.PyTreeCheckpointHandler(),
                    "extra": ocp.JsonCheckpointHandler(),
                    "checksums": ocp.JsonCheckpointHandler(),
                },
            )

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Begins to save `state` (a pytree of arrays) and `extra` (JSON) as checkpoint `step`.

        Returns once the arrays are copied, so that they may be donated; a save still running is
        waited for first. A step that is there already is left as it is. Raises the error of this
        or the save before, the newest complete checkpoint being untouched.
        """
        latest = self.latest_step()
        if step in self._manager.all_steps():
            return
        assert latest is None or step > latest, f"step {step} saved after step {latest}"
        named = _storable(named_leaves(state))
        with self._clear_errors(f"of step {step} could not be written", _ROOM):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(named),
                    extra=ocp.args.JsonSave(dict(extra)),
                    checksums=ocp.args.JsonSave(checksums(named)),
                ),
                force=True,  # when to save is the loop's decision
            )

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, None where there is none; waits for one being written."""
        self.wait()
        return self._manager.latest_step()

    def extra(self, step: int) -> dict[str, Any]:
        """The JSON object saved with checkpoint `step`; reads no arrays."""
        self.wait()
        with self._reading(step):
            args = ocp.args.Composite(extra=ocp.args.JsonRestore())
            extra = self._manager.restore(step, args=args)["extra"]
            if not isinstance(extra, dict):
                raise ValueError("extra/metadata is not a JSON object")
            return extra

    def check(self, step: int, abstract_state: Any) -> None:
        """Refuse a state that checkpoint `step` does not hold, by its names and shapes alone."""
        self.wait()
        self._check_shapes(step, _storable(named_leaves(abstract_state)))

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """The state of checkpoint `step` with the tree, dtypes and shardings of `abstract_state`.

        Its leaves are `jax.ShapeDtypeStruct`s or arrays; one without a sharding goes to the
        default device. What the checkpoint holds beyond them is not read. Also returns `extra`.
        """
        return self._restore(step, abstract_state, prefix=""), self.extra(step)

    def restore_part(self, step: int, part: str, abstract: Any) -> Any:
        """A field of the state, such as "params", as `restore` does; nothing else is read."""
        return self._restore(step, abstract, prefix=part + "/")

    def wait(self) -> None:
        """Returns when no save is running; raises the error of one that failed."""
        with self._clear_errors("could not be written", _ROOM):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Waits for a running save, then lets go of the directory."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _restore(self, step: int, abstract: Any, prefix: str) -> Any:
        self.wait()
        named = {prefix + name: leaf for name, leaf in named_leaves(abstract).items()}
        targets = _storable(named)
        dtypes = self._check_shapes(step, targets)
        with self._reading(step):
            args = ocp.args.PyTreeRestore(
                targets,
                restore_args={name: _restore_args(leaf) for name, leaf in targets.items()},
                partial_restore=True,
            )
            stored = self._manager.restore(step, args=ocp.args.Composite(state=args))["state"]
            self._check_sums(step, {k: stored[k] for k in targets if stored[k].dtype == dtypes[k]})
        values = {
            name.removeprefix(prefix): _as_saved(stored[name], leaf) for name, leaf in named.items()
        }
        return tree_of(values, abstract)

    def _check_sums(self, step: int, stored: dict[str, jax.Array]) -> None:
        """Refuse arrays that are not as they were saved; older checkpoints do not say how."""
        if not (self.directory / str(step) / "checksums").is_dir():
            return
        args = ocp.args.Composite(checksums=ocp.args.JsonRestore())
        saved = self._manager.restore(step, args=args)["checksums"]
        wrong = [name for name, value in checksums(stored).items() if saved.get(name) != value]
        if wrong:
            raise ValueError(f"{', '.join(wrong[:3])} differs from what was saved (checksum)")

    def _check_shapes(self, step: int, targets: dict[str, Any]) -> dict[str, Any]:
        """Refuse arrays that are not there or of another shape; the dtypes they were saved in."""
        with self._reading(step):
            metadata = self._manager.item_metadata(step)["state"]
            if metadata is None:
                raise ValueError("state/_METADATA is missing")
            saved = metadata.tree
        what = f"checkpoint of step {step} in {self.directory}"
        for name, leaf in targets.items():
            if name not in saved:
                raise UsageError(
                    f"{what} holds no {name}: it was saved with other settings of model, optimizer "
                    "or precision; give them back their values"
                )
            if tuple(saved[name].shape) != tuple(leaf.shape):
                raise UsageError(
                    f"{what}: {name} has shape {tuple(saved[name].shape)}, not "
                    f"{tuple(leaf.shape)}: it was saved with another model; give it back its values"
                )
        return {name: jnp.dtype(saved[name].dtype) for name in targets}

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        fix = f"if it is damaged, remove {self.directory / str(step)} to go on from the one before"
        with self._clear_errors(f"of step {step} could not be read", fix), _loops_that_finish():
            yield

    @contextmanager
    def _clear_errors(self, what: str, fix: str = "") -> Iterator[None]:
        """Turns errors of storage (orbax and tensorstore use many types) into one line."""
        try:
            yield
        except UsageError:
            raise
        except Exception as error:
            reason = _shortened(str(error)) or type(error).__name__
            if isinstance(error, LookupError | AttributeError | TypeError):
                # Words of orbax's code, met where a file says something that it never wrote.
                reason = f"{type(error).__name__}: {reason}"
            said = "; ".join(filter(None, (reason, fix)))
            raise UsageError(f"checkpoint {what} in {self.directory}: {said}") from error


def _options(config: CheckpointConfig | None) -> ocp.CheckpointManagerOptions:
    if config is None:
        return ocp.CheckpointManagerOptions(read_only=True, create=False)
    return ocp.CheckpointManagerOptions(
        max_to_keep=config.keep_last,
        keep_period=config.keep_every,
        enable_async_checkpointing=config.asynchronous,
        cleanup_tmp_directories=True,
        prevent_write_metrics=True,
        save_root_metadata=False,
    )


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _storable(named: dict[str, Any]) -> dict[str, Any]:
    """Typed PRNG keys as their uint32 words, all else as it is; abstract in, abstract out."""
    return {name: _key_words(leaf) if _is_key(leaf) else leaf for name, leaf in named.items()}


def _key_words(key: Any) -> Any:
    if isinstance(key, jax.Array):
        return jax.random.key_data(key)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(key.shape, key.dtype))
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=key.sharding)


def _as_saved(stored: Any, target: Any) -> Any:
    if not _is_key(target):
        return stored
    return jax.random.wrap_key_data(stored, impl=target.dtype._impl)


def _restore_args(target: Any) -> ocp.ArrayRestoreArgs:
    sharding = target.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return ocp.ArrayRestoreArgs(
        sharding=sharding, global_shape=target.shape, dtype=target.dtype, strict=True
    )


def _shortened(message: str) -> str:
    """The message in one line, without tensorstore's account of the array; its end says why."""
    line = " ".join(re.split(r"\[tensorstore_spec=|See full TensorStore", message)[0].split())
    return line if len(line) <= 400 else f"{line[:200]} ... {line[-200:]}"


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs tracebacks of errors that are raised here anyway."""
    return "orbax" not in record.pathname


class _LoopsThatFinish(asyncio.DefaultEventLoopPolicy):
    """Makes event loops that finish what runs in them before they close.

    Orbax closes its loop at a restore's first error. The other reads would then fail later, with
    the loop closed and nobody to take the error, which Python can only print.
    """

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _LoopThatFinishes()


class _LoopThatFinishes(asyncio.SelectorEventLoop):
    def close(self) -> None:
        self.set_exception_handler(lambda _, context: None)  # the first error is raised already
        while not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextmanager
def _loops_that_finish() -> Iterator[None]:
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_LoopsThatFinish())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
