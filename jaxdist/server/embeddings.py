"""POST /v1/embeddings: texts as vectors of length 1."""

import base64

import numpy as np

from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.server.errors import APIError
from jaxdist.server.prompts import cut, encode, split
from jaxdist.server.protocol import EmbeddingRequest
from jaxdist.server.requests import Job
from jaxdist.server.responses import Embedding, Embeddings
from jaxdist.server.service import Model


async def prepare(request: EmbeddingRequest, job: Job, model: Model) -> None:
    """Check all of it. APIError where something is wrong."""
    texts, most = split(request.input), job.service.options.limits.max_prompts
    if len(texts) > most:
        raise APIError(
            f"input: {len(texts)} are too many; at most {most} are allowed", param="input"
        )
    if request.dimensions not in (None, model.hidden_size):
        raise APIError(
            f"dimensions must be {model.hidden_size}: the model's vectors are not made to be cut",
            param="dimensions",
        )
    special = request.add_special_tokens is not False
    encoded = await encode(model, texts, "input", add_special_tokens=special)
    await job.prepare(
        model,
        cut(encoded, request.truncate_prompt_tokens, model.room()),
        SamplingParams(),
        priority=request.priority,
        pooling=request.pooling or "mean",
        called={"prompt": "input"},
    )


async def whole(request: EmbeddingRequest, job: Job) -> Embeddings:
    """The answer."""
    data = []
    for i, output in enumerate(await job.finished()):
        assert output.embedding is not None
        vector = np.asarray(output.embedding, np.float32)
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        told = vector.tolist()
        if request.encoding_format == "base64":
            told = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append(Embedding(object="embedding", index=i, embedding=told))
    return Embeddings(
        object="list",
        model=job.service.options.names[0],
        data=data,
        usage=job.usage(without_answer=True),
    )
