"""The peers: transformers' Llama trained by torch as it is, compiled, or under DeepSpeed.

The recipe is jaxdist's: fp32 masters, autocast for bf16, AdamW (torch's fused one), clipping.
"""

import importlib
import os
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.spec import BETAS, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, Feed, Shape, Spec
from bench.worker import Run


def start(spec: Spec) -> tuple[Run, dict]:
    """Build the model, find the best thread count, compile; see `bench.worker`."""
    torch.manual_seed(0)
    device = "cuda" if spec.device == "gpu" else "cpu"
    # On a GPU flash attention or nothing: its own or cuDNN's, never a silent fallback.
    torch.backends.cuda.enable_math_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    model = _model(spec.shape, device)
    about = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "torch": torch.__version__,
    }
    if spec.framework == "deepspeed":
        return _deepspeed(spec, model), about | {"losses": []}
    optimizer = _adamw(model)
    run = _runner(spec, model, optimizer, device)
    losses = _set_best_thread_count(run) if device == "cpu" else []
    if spec.compiled:
        run = _runner(spec, torch.compile(model), optimizer, device)
    return run, about | {"losses": losses, "threads": torch.get_num_threads()}


def _model(shape: Shape, device: str) -> Any:
    """A fresh model; its attention is torch's fused one, transformers' default."""
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**shape.model_fields(), use_cache=False)).train()


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )


def _feed(shape: Shape, device: str, rows: slice = slice(None)) -> Feed:
    return Feed(
        [
            tuple(torch.from_numpy(part[rows].copy()).to(device) for part in batch)
            for batch in shape.batches()
        ]
    )


def _loss(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # Given shift_labels, transformers scores all tokens instead of cutting the last one off.
    return model(input_ids=tokens, labels=labels, shift_labels=labels).loss


def _runner(spec: Spec, model: Any, optimizer: torch.optim.Optimizer, device: str) -> Run:
    feed = _feed(spec.shape, device)
    bf16 = spec.precision == "bf16"

    def run(steps: int) -> list[float]:
        losses = []
        for tokens, labels in feed.take(steps):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
                loss = _loss(model, tokens, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if device == "cuda":
            torch.cuda.synchronize()
        return [loss.item() for loss in losses]

    return run


def _set_best_thread_count(run: Run) -> list[float]:
    """Keep the fastest of torch's default, all cores and half of them; returns the losses seen."""
    cores = len(os.sched_getaffinity(0))
    counts = sorted({torch.get_num_threads(), cores, max(1, cores // 2)})
    losses, seconds = run(1), {}
    for count in counts:
        torch.set_num_threads(count)
        losses += run(1)
        begin = time.perf_counter()
        losses += run(2)
        seconds[count] = time.perf_counter() - begin
    torch.set_num_threads(min(seconds, key=seconds.__getitem__))
    return losses


def _deepspeed(spec: Spec, model: torch.nn.Module) -> Run:
    """ZeRO-1 over the processes that the parent has started, each with its part of the batch."""
    deepspeed = importlib.import_module("deepspeed")  # only its own interpreter need have it
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_adamw(model),
        config={
            "train_batch_size": spec.shape.rows,
            "train_micro_batch_size_per_gpu": spec.shape.rows // count,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": spec.precision == "bf16"},
            "gradient_clipping": MAX_GRAD_NORM,
            "steps_per_print": 1 << 30,
        },
    )
    share = spec.shape.rows // count
    feed = _feed(spec.shape, "cpu", slice(rank * share, (rank + 1) * share))

    def run(steps: int) -> list[float]:
        losses = []
        for tokens, labels in feed.take(steps):
            loss = _loss(engine, tokens, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    return run
