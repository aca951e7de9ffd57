"""Sections other than the model, each by its own rules."""

from pathlib import Path
from typing import Any

import pytest

import jaxdist
from jaxdist.config import (
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ProfileConfig,
    TrainConfig,
    UsageError,
)
from jaxdist.config.compute import SAVED_ACTIVATIONS
from jaxdist.models.remat import DOT_NAMES

NAN = float("nan")


@pytest.mark.parametrize(
    ("section", "fields", "word"),
    [
        (ParallelConfig, {"zero": 4}, "parallel.zero=4 is not one of 0, 1, 2, 3"),
        (ParallelConfig, {"zero": "1"}, "zero"),
        (ParallelConfig, {"schedule": "2f2b"}, "gpipe, 1f1b, interleaved, zb"),
        (ParallelConfig, {"schedule": 3}, "parallel.schedule"),
        (ParallelConfig, {"schedule": "zb", "num_chunks": 2}, "set --parallel.schedule interleav"),
        (ParallelConfig, {"num_chunks": 0}, "num_chunks"),
        (ParallelConfig, {"layout": "7,8,"}, "layout='7,8,' must be the layers of each stretch"),
        (ParallelConfig, {"layout": "0,4"}, "1 or more"),
        (ParallelConfig, {"layout": 4}, "layout=4"),
        (ParallelConfig, {"offload_activations": "no"}, "offload_activations"),
        (ParallelConfig, {"num_microbatches": 0}, "num_microbatches"),
        (ParallelConfig, {"remat": "qkv,atn_out"}, "did you mean attn_out"),
        (ParallelConfig, {"remat": "full,qkv"}, "'full'"),
        (ParallelConfig, {"remat": ""}, "remat"),
        (ParallelConfig, {"skip_bubbles": "yes"}, "skip_bubbles"),
        (PrecisionConfig, {"policy": "fp17"}, "did you mean fp16"),
        (PrecisionConfig, {"param_dtype": "float16"}, "float32 or bfloat16"),
        (PrecisionConfig, {"moment_dtype": "fp16"}, "float32 or bfloat16"),
        (PrecisionConfig, {"compute_dtype": "float64"}, "compute_dtype"),
        (PrecisionConfig, {"reduce_dtype": "fp16"}, "reduce_dtype=float16 loses gradients below"),
        (PrecisionConfig, {"loss_scale_init": 0.5}, "loss_scale_init"),
        (PrecisionConfig, {"loss_scale_min": 0.0}, "loss_scale_min"),
        (PrecisionConfig, {"loss_scale_hysteresis": 0}, "hysteresis"),
        (OptimizerConfig, {"name": "adamz"}, "adam"),
        (OptimizerConfig, {"learning_rate": NAN}, "optimizer.learning_rate=nan"),
        (OptimizerConfig, {"learning_rate": -1e-3}, "learning_rate"),
        (OptimizerConfig, {"schedule": "cosin"}, "did you mean cosine"),
        (OptimizerConfig, {"warmup_steps": -1}, "warmup_steps"),
        (OptimizerConfig, {"min_learning_rate_ratio": 1.5}, "min_learning_rate_ratio"),
        (OptimizerConfig, {"beta1": 1.0}, "less than 1"),
        (OptimizerConfig, {"eps": 0}, "eps"),
        (OptimizerConfig, {"max_grad_norm": 0.0}, "max_grad_norm"),
        (OptimizerConfig, {"ema_decay": 1}, "ema_decay"),
        (TrainConfig, {"steps": 0}, "train.steps=0"),
        (TrainConfig, {"steps": 10, "stop_after": 11}, "at most 10"),
        (TrainConfig, {"stop_after": 0}, "stop_after"),
        (TrainConfig, {"global_batch_size": 0}, "global_batch_size"),
        (TrainConfig, {"sequence_length": 1}, "sequence_length"),
        (TrainConfig, {"on_nonfinite": "ignore"}, "stop, skip"),
        (CheckpointConfig, {"every": 0}, "checkpoint.every"),
        (CheckpointConfig, {"keep_last": 0}, "keep_last"),
        (CheckpointConfig, {"keep_every": 0}, "keep_every"),
        (EvalConfig, {"every": 0}, "eval.every"),
        (EvalConfig, {"batches": 0}, "eval.batches"),
        (ProfileConfig, {"steps": "12:10"}, "FIRST:LAST"),
        (ProfileConfig, {"steps": "0:3"}, "FIRST:LAST"),
        (ProfileConfig, {"steps": "5"}, "FIRST:LAST"),
        (ProfileConfig, {"steps": 5}, "FIRST:LAST"),
        (ProfileConfig, {"steps": f"1:{'9' * 5000}"}, "FIRST:LAST"),
        (LogConfig, {"wandb": ""}, "log.wandb"),
        (LogConfig, {"progress": None}, "log.progress"),
    ],
)
def test_refused(section: type, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        section(**fields)


@pytest.mark.parametrize(
    ("remat", "names"),
    [("none", ()), ("full", ()), ("dots", ("dots",)), ("qkv, attn_out", ("qkv", "attn_out"))],
)
def test_saved_activations(remat: str, names: tuple[str, ...]) -> None:
    assert ParallelConfig(remat=remat).saved_activations == names


def test_saved_activations_are_those_that_the_models_name() -> None:
    assert set(SAVED_ACTIVATIONS) == {"dots", "qkv", "attn_out", "mlp_hidden", *DOT_NAMES}
    files = Path(jaxdist.__file__).parent.glob("*/*.py")
    text = "".join(
        file.read_text() for file in files if "import checkpoint_name" in file.read_text()
    )
    assert [name for name in SAVED_ACTIVATIONS[1:] if f'"{name}"' not in text] == []


def test_short_dtypes_are_spelled_out() -> None:
    assert PrecisionConfig(reduce_dtype="bf16").reduce_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"policy": "fp32"}, False),
        ({"policy": "bf16"}, False),
        ({"policy": "fp16"}, True),
        ({"policy": "fp16", "compute_dtype": "fp32"}, False),
        ({"policy": "fp32", "compute_dtype": "float16"}, True),
    ],
)
def test_loss_scale_is_for_fp16_compute(fields: dict[str, Any], needed: bool) -> None:
    assert PrecisionConfig(**fields).needs_loss_scale is needed


def test_profile_steps() -> None:
    assert ProfileConfig(steps="10:12").first_and_last == (10, 12)
    assert ProfileConfig().first_and_last is None
