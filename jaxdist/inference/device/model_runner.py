"""The device's side of the engine: weights, pool and programs; `step.py: Runner` says what it does.

A step's rows become a few launches of padded shapes (`launches.py`); all that a launch must know is
one int32 array. Nothing here blocks until `wait` fetches the results.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import MeshShape, ModelConfig
from jaxdist.inference.device import kv_pool
from jaxdist.inference.device.after_forward import hidden_states, prompt_logprobs
from jaxdist.inference.device.buckets import Buckets, Shape
from jaxdist.inference.device.call import Call, Computed
from jaxdist.inference.device.compilations import num_compilations
from jaxdist.inference.device.forward import Forward
from jaxdist.inference.device.launches import Launch, Launches
from jaxdist.inference.device.paging import paging_of
from jaxdist.inference.device.row_results import Launched, Running
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.device.slot_sampler import SlotSampler
from jaxdist.inference.sampling.sampler_state import is_plain
from jaxdist.inference.scheduling.step import NewSequence, Row, RowResult
from jaxdist.inference.weights.placement import Load, place
from jaxdist.parallel.mesh import make_mesh


class ModelRunner:
    """`Runner` for a model on a mesh.

    Attributes:
        sampler: What the slots sample by.
        pool: How large the KV pool is, and why.
    """

    def __init__(
        self,
        config: ModelConfig,
        load: Load,
        *,
        mesh: MeshShape,
        options: RunnerOptions,
        vocab_size: int | None = None,
        eos_ids: Collection[int] = (),
    ):
        """Reads the weights and makes the pool. Compile with `warm_up.warm_up`, or as it comes.

        Args:
            config: The model's shape.
            load: Takes an abstract model to its parameters, such as `ModelSource.parameters`.
            mesh: Replicas, stages and tensor parallelism.
            options: Sizes and dtypes.
            vocab_size: Ids that may be sampled, where the tokenizer has fewer than the model.
            eos_ids: Tokens that are not sampled before `min_tokens`.
        """
        options.check(config, mesh)
        config = options.served(config, mesh)
        self.mesh = make_mesh(mesh)
        self.block_size = options.block_size
        self.num_replicas = mesh.dp
        self.max_num_seqs = options.max_num_seqs
        self.max_model_len = options.model_len(config)
        self.max_row_tokens = min(options.max_row_tokens, self.max_model_len)
        self.vocab_size = min(vocab_size or config.vocab_size, config.vocab_size)
        weights = place(config, load, self.mesh, options.dtype)
        self.config, self.hidden_size = weights.config, config.hidden_size
        paging = paging_of(self.mesh)
        self.pool = kv_pool.decide(config, self.mesh, options)
        self.num_blocks = self.pool.num_blocks
        self._slots = options.max_num_seqs // mesh.dp  # of a replica
        self.buckets = Buckets(
            max_rows=self._slots,
            max_drafts=options.max_drafts,
            max_tokens=self.max_row_tokens,
            max_width=-(-self.max_model_len // options.block_size),
        )
        self._launches = Launches(
            buckets=self.buckets, num_replicas=self.num_replicas, num_slots=self._slots
        )
        self._arrays = weights.arrays
        self._forward = Forward(
            weights=weights,
            mesh=self.mesh,
            compute_dtype=jnp.dtype(options.dtype),
            kv_dtype=kv_pool.kv_dtype(options),
            paging=paging,
            num_blocks=self.num_blocks,
        )
        self._programs: dict[Shape, Callable] = {}
        self._by_replica = NamedSharding(self.mesh, P("dp"))
        with jax.set_mesh(self.mesh):
            self._rope = self._forward.rope(self.max_model_len)
            self._pages = kv_pool.make(config, self.mesh, options, self.num_blocks, paging)
        self._score = jax.jit(
            partial(prompt_logprobs, ctx=self._forward.context, vocab_size=self.vocab_size)
        )
        self.sampler = SlotSampler(
            self.mesh,
            self.buckets,
            num_slots=self.max_num_seqs,
            vocab_size=self.vocab_size,
            num_columns=config.vocab_size,
            eos_ids=eos_ids,
        )
        self._sequences: dict[int, NewSequence] = {}
        self._sums: dict[int, np.ndarray] = {}  # of hidden states, by slot, for their mean
        self._warm_compilations = num_compilations()
        self._tokens = self._padded_tokens = 0

    def start(self, slot: int, sequence: NewSequence) -> None:
        """A sequence takes a free slot."""
        self._sequences[slot] = sequence
        self._sums.pop(slot, None)
        if sequence.pooling is None:
            self.sampler.start(slot, sequence)

    def stop(self, slot: int) -> None:
        """The slot is free again."""
        del self._sequences[slot]

    def launch(self, rows: Sequence[Row]) -> Launched:
        """Start a step; does not wait for the device."""
        launches = self._launches.of(rows, self._is_whole)
        return Launched(
            rows=rows,
            sequences=[self._sequences[row.slot] for row in rows],
            running=[self._run(launch, rows) for launch in launches],
        )

    def sample(self, launched: Launched, masks: Mapping[int, np.ndarray | None]) -> None:
        """Start the sampling that waits for these masks, by number of the row."""
        rows = [
            replace(row, masks=masks[number]) if number in masks else row
            for number, row in enumerate(launched.rows)
        ]
        for running in launched.running:
            if running.waiting is not None:
                running.sampled = running.waiting(
                    running.launch.masks(rows, self.sampler.num_words)
                )
                running.waiting = None

    def wait(self, launched: Launched) -> list[RowResult]:
        """Results of a step, one a row."""
        return launched.results(self._sums)

    def stats(self) -> Mapping[str, float]:
        """Compilations since the warm-up, and the share of computed tokens that was padding."""
        padded = self._padded_tokens
        return {
            "num_compilations": num_compilations() - self._warm_compilations,
            "padding_ratio": 1 - self._tokens / padded if padded else 0.0,
        }

    def is_warm(self) -> None:
        """From now on compilations count."""
        self._warm_compilations = num_compilations()

    def compute(self, launch: Launch) -> Computed:
        """Start the forward pass of one launch."""
        logits, x, rows, self._pages = self.compute_call(launch)()
        return Computed(logits=logits, x=x, rows=rows)

    def compute_call(self, launch: Launch) -> Call:
        """What `compute` runs."""
        packed = jax.device_put(launch.packed, self._by_replica)
        args = (self._arrays, self._rope, self._pages, self.sampler.last, packed)
        return Call(self._program(launch.shape), args)

    def _run(self, launch: Launch, rows: Sequence[Row]) -> Running:
        sequences = [self._sequences[rows[piece.row].slot] for piece in launch.pieces]
        sampling = [s.params for s, p in zip(sequences, launch.pieces, strict=True) if p.samples]
        self._tokens += sum(piece.count for piece in launch.pieces)
        self._padded_tokens += len(launch.packed) * launch.shape.queries
        running = Running(launch=launch)
        with jax.set_mesh(self.mesh):
            computed = self.compute(launch)
            if sampling:
                draw = partial(
                    self.sampler.draw,
                    computed,
                    plain=all(map(is_plain, sampling)),
                    logprobs=any(params.logprobs is not None for params in sampling),
                )
                if any(rows[piece.row].masks_follow and piece.samples for piece in launch.pieces):
                    running.waiting = draw
                else:
                    running.sampled = draw(launch.masks(rows, self.sampler.num_words))
            for index, (piece, sequence) in enumerate(zip(launch.pieces, sequences, strict=True)):
                row, place = rows[piece.row], launch.places[index]
                if sequence.pooling is not None:
                    running.hidden[index] = self.hidden_call(computed.x, place)()
                elif self._is_whole(row):
                    following = sequence.prompt_ids[row.position + piece.first + 1 :]
                    running.prompt_logprobs[index] = self.score_call(computed.x, place, following)()
        return running

    def score_call(self, x: Array, place: int, next_tokens: Sequence[int]) -> Call:
        """Gives log-probabilities of the tokens that follow those of row `place` of x."""
        tokens = np.zeros(x.shape[1], np.int32)
        tokens[: len(next_tokens)] = next_tokens[: len(tokens)]
        return Call(self._score, (self._arrays[0], x, np.int32(place), tokens))

    def hidden_call(self, x: Array, place: int) -> Call:
        """Gives hidden states of row `place` after the final norm, [T, E] fp32."""
        return Call(hidden_states, (self._arrays[0].norm, x, np.int32(place)))

    def _is_whole(self, row: Row) -> bool:
        """Whether something is told of each of the row's tokens: as a prompt's part."""
        sequence = self._sequences[row.slot]
        wanted = sequence.pooling is None and sequence.params.prompt_logprobs is not None
        return sequence.pooling is not None or (
            wanted and row.position + 1 < len(sequence.prompt_ids)
        )

    def _program(self, shape: Shape) -> Callable:
        if shape not in self._programs:
            self._programs[shape] = jax.jit(self._forward.program(shape), donate_argnums=2)
        return self._programs[shape]
