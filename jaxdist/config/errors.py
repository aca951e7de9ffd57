"""User errors: one line on stderr with the rule, the value and the fix, and exit code 2."""

import difflib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread

EXIT_CODE = 2
CTRL_C_EXIT_CODE = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE
TRACEBACK = "JAXDIST_TRACEBACK"
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")  # how XLA's RuntimeError says it

# What others call our keys, where the spelling alone would not lead there.
OTHER_NAMES = {
    "mesh": "dp pp tp tp_size pp_size tensor_parallel_size pipeline_parallel_size num_gpus",
    "init_from": "model model_name_or_path pretrained pretrained_model from_pretrained",
    "model.num_hidden_layers": "layers num_layers n_layers n_layer depth",
    "model.hidden_size": "hidden hidden_dim d_model n_embd width",
    "model.intermediate_size": "ffn ffn_dim d_ff mlp_dim",
    "model.num_attention_heads": "heads num_heads n_heads n_head",
    "model.num_key_value_heads": "kv_heads num_kv_heads n_kv_heads",
    "parallel.zero": "fsdp ddp deepspeed zero_stage zero_optimization",
    "parallel.num_microbatches": "grad_accum grad_accumulation_steps gradient_accumulation_steps",
    "parallel.remat": "gradient_checkpointing activation_checkpointing recompute",
    "precision.policy": "bf16 fp16 dtype torch_dtype mixed_precision",
    "optimizer.learning_rate": "lr peak_lr max_lr",
    "optimizer.min_learning_rate_ratio": "min_lr min_lr_ratio",
    "optimizer.warmup_steps": "warmup num_warmup_steps",
    "optimizer.weight_decay": "wd decay",
    "optimizer.max_grad_norm": "clip grad_clip clip_grad gradient_clipping",
    "train.steps": "epochs num_train_epochs iters iterations max_iters max_steps num_steps",
    "train.global_batch_size": "batch bs batch_size train_batch_size per_device_train_batch_size",
    "train.sequence_length": "seq_len seq_length seqlen max_seq_len block_size context_length",
    "data.sources": "dataset dataset_name dataset_path data_path train_file",
    "checkpoint.every": "save_every save_interval save_steps",
    "checkpoint.keep_last": "save_total_limit",
    "eval.every": "eval_interval eval_steps",
    "log.wandb": "report_to wandb_project",
}
_OURS = {other: ours for ours, others in OTHER_NAMES.items() for other in others.split()}


class UsageError(ValueError):
    """What the user asked for cannot work; the message names the rule, the value and the fix."""


def nearest(word: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates that `word` may be a misspelling of, best first; empty where none is near.

    A dotted candidate is also compared by its last part, so that `lerning_rate` finds
    `optimizer.learning_rate`. One that is another's name for a key of ours, as `lr` is, counts as
    that key, where it is a candidate.
    """

    def score(candidate: str) -> float:
        bare = candidate.lstrip("-")
        whole = difflib.SequenceMatcher(None, wanted, bare).ratio()
        last = difflib.SequenceMatcher(
            None, wanted.rsplit(".", 1)[-1], bare.rsplit(".", 1)[-1]
        ).ratio()
        return max(whole, last - 0.01)  # at a tie the section that was written wins

    candidates = list(candidates)
    wanted: str = word.lstrip("-")
    ours = _OURS.get(wanted.rpartition(".")[2].replace("-", "_"))
    if ours and ours in (candidate.lstrip("-").replace("-", "_") for candidate in candidates):
        wanted = ours
    scored = sorted(((score(c), c) for c in candidates), key=lambda pair: (-pair[0], pair[1]))
    floor = max(0.6, scored[0][0] - 0.1) if scored else 0
    return [candidate for value, candidate in scored[:count] if value >= floor]


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean a, b?` or, where nothing is near, an empty string."""
    close = nearest(word, candidates)
    return f"; did you mean {' or '.join(close)}?" if close else ""


@contextmanager
def one_line_errors(prog: str = "jaxdist") -> Iterator[None]:
    """Turn a ValueError, OSError or lack of memory into one line on stderr and exit code 2.

    Ctrl-C, and a reader of our output that has gone, end with their exit codes and no word. With
    JAXDIST_TRACEBACK=1 in the environment errors pass through unchanged.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and current_thread() is main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except BrokenPipeError:
        # What is still buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE_EXIT_CODE) from None
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if os.environ.get(TRACEBACK, "") not in ("", "0"):
            raise
        if isinstance(error, (MemoryError, RuntimeError)):
            error = _too_large(error)
        message = " ".join(str(error).split()) or type(error).__name__
        # What we refuse says all there is to say; of others the place may be wanted.
        hint = "" if isinstance(error, (UsageError, OSError)) else f" ({TRACEBACK}=1 shows where)"
        print(f"{prog}: error: {message}{hint}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE) from None
    except KeyboardInterrupt:
        raise SystemExit(CTRL_C_EXIT_CODE) from None
    except SystemExit as leaving:
        # What rich's Console makes of a reader that has gone has another exit code.
        if isinstance(leaving.__context__, BrokenPipeError):
            raise SystemExit(BROKEN_PIPE_EXIT_CODE) from None
        raise


def _too_large(error: MemoryError | RuntimeError) -> UsageError:
    """What to say where memory ran out; any other error is raised again."""
    text = str(error)
    if not isinstance(error, MemoryError) and not any(word in text for word in _OUT_OF_MEMORY):
        raise error
    reason = text.partition("\n")[0][:200]
    return UsageError(
        f"out of memory ({reason}); choose a smaller model or batch, more microbatches, "
        "--parallel.remat full, or more devices; --dry-run shows what a step needs"
    )
