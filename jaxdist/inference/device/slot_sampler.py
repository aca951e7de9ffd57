"""What the slots' sequences sample by, on the device, and the programs that draw their tokens.

By parameters takes longest of all to compile. The CPU does it one row after the other, where rows
of padding cost next to nothing: there several shapes share a program of more rows.

Shapes: D replicas, B rows of each, X scored positions, V columns of the logits, W words of masks.
"""

from collections.abc import Callable, Collection
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.inference.device.after_forward import TOP, sample_step, with_more_rows
from jaxdist.inference.device.buckets import Buckets
from jaxdist.inference.device.call import Call, Computed
from jaxdist.inference.sampling.sampler import Sampled
from jaxdist.inference.sampling.sampler_state import empty_state, slot_state, start_slot
from jaxdist.inference.scheduling.step import NewSequence
from jaxdist.inference.weights.placement import platform_of

ALL = 0xFFFFFFFF  # a word of masks that allows everything


class SlotSampler:
    """The sampler's state of all slots.

    Attributes:
        num_words: Of a mask, W.
    """

    def __init__(
        self,
        mesh: Mesh,
        buckets: Buckets,
        *,
        num_slots: int,
        vocab_size: int,
        num_columns: int,
        eos_ids: Collection[int],
    ):
        """num_slots: Of all replicas. vocab_size: Ids that may be sampled, of V `num_columns`."""
        self.num_words = -(-vocab_size // 32)
        self._mesh, self._buckets, self._eos_ids = mesh, buckets, sorted(eos_ids)
        self._vocab_size, self._num_columns = vocab_size, num_columns
        self._by_replica = NamedSharding(mesh, P("dp"))
        self._wideners: dict[tuple[int, int], Callable] = {}  # by rows and scored positions
        with jax.set_mesh(mesh):
            self._state = jax.device_put(empty_state(num_slots, num_columns), self._by_replica)
            self._start = jax.jit(start_slot, donate_argnums=0, out_shardings=self._by_replica)

    @property
    def last(self) -> Array:
        """What each slot sampled last, int32 [slots]."""
        return self._state.last

    def start(self, slot: int, sequence: NewSequence) -> None:
        """Put a sequence's parameters and history into its slot."""
        one = slot_state(
            sequence.params,
            sequence.prompt_ids,
            sequence.output_ids,
            eos_ids=self._eos_ids,
            vocab_size=self._vocab_size,
            num_columns=self._num_columns,
        )
        with jax.set_mesh(self._mesh):
            self._state = self._start(self._state, np.int32(slot), one)

    def draw(
        self,
        computed: Computed,
        masks: np.ndarray | None = None,
        *,
        plain: bool = True,
        logprobs: bool = False,
    ) -> Sampled:
        """Start the sampling after a forward pass.

        masks: uint32 [D * B, X, W]. plain: All rows' parameters are `is_plain`. Each replica may
        have more rows in the result than in `computed`.
        """
        with jax.set_mesh(self._mesh):
            call = self.call(computed, masks, plain=plain, logprobs=logprobs)
            sampled, self._state = call()
        return sampled

    def call(
        self, computed: Computed, masks: np.ndarray | None = None, *, plain: bool, logprobs: bool
    ) -> Call:
        """What `draw` runs."""
        logits, rows = computed.logits, computed.rows
        plain = plain and masks is None
        if not plain:
            if masks is None:  # one program for both
                masks = np.full((*logits.shape[:2], self.num_words), ALL, np.uint32)
            logits, rows, masks = self._widened(logits, rows, masks)
            masks = jax.device_put(masks, self._by_replica)
        fixed = {
            "mesh": self._mesh,
            "vocab_size": self._vocab_size,
            "plain": plain,
            "top": TOP if logprobs else None,
        }
        return Call(sample_step, (logits, self._state, rows, masks), fixed)

    def num_rows(self, rows: int) -> int:
        """Rows of a replica in the program that samples by parameters for so many."""
        is_cpu = platform_of(self._mesh) == "cpu"
        return self._buckets.sampler_rows(rows) if is_cpu else rows

    def _widened(
        self, logits: Array, rows: Array, masks: np.ndarray
    ) -> tuple[Array, Array, np.ndarray]:
        """With as many rows as the program has that samples by parameters."""
        num_replicas = self._mesh.shape["dp"]
        own = len(masks) // num_replicas
        count = self.num_rows(own)
        if count == own:
            return logits, rows, masks
        key = (own, logits.shape[1])
        if key not in self._wideners:
            widen = partial(with_more_rows, num_replicas=num_replicas, num_rows=count)
            layouts = [logits.sharding, rows.sharding]
            self._wideners[key] = jax.jit(widen, out_shardings=layouts)
        logits, rows = self._wideners[key]([logits, rows])
        (masks,) = with_more_rows([masks], num_replicas, count)
        return logits, rows, masks
