"""POST /v1/chat/completions: chats that are answered."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from jaxdist.inference.guidance.thoughts import BEGIN, END, Opening
from jaxdist.inference.outputs import CompletionOutput, Logprobs
from jaxdist.server import sampling
from jaxdist.server.answer_reader import AnswerReader
from jaxdist.server.completions import likeliest, prompt_logprobs
from jaxdist.server.dialects.choice import chosen
from jaxdist.server.dialects.dialect import CallDelta, Delta
from jaxdist.server.prompts import cut
from jaxdist.server.protocol import ChatRequest
from jaxdist.server.reasoning import ReasoningParser, opening
from jaxdist.server.requests import Job, StreamUsage
from jaxdist.server.responses import (
    AnswerMessage,
    Call,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    FinishReason,
    TokenLogprob,
    TopLogprob,
)
from jaxdist.server.service import Model
from jaxdist.server.structures import structure_field
from jaxdist.server.tools import ToolUse

_PROMPT_END = 64  # tokens in which the opening of thoughts is seen


class ChatJob:
    """One request and its answers."""

    def __init__(self, request: ChatRequest, job: Job, model: Model):
        self._request, self._job, self._model = request, job, model
        template = model.chat.template if model.chat.tells_tools else None
        dialect = chosen(job.service.options.tool_call_parser, template)
        self._use = ToolUse(request, dialect)
        self._thoughts = job.service.options.reasoning_parser
        self._opening = Opening.AFTER  # where the answer begins

    async def prepare(self) -> None:
        """Check all of it. APIError where something is wrong."""
        request, job, model = self._request, self._job, self._model
        job.service.options.limits.check(request)
        structure = self._use.structure()
        params = sampling.of_chat(request, structure, model.chat.stops, model.defaults)
        marks = [*self._use.marks, *((BEGIN, END) if self._thoughts != "none" else ())]
        if any(map(model.chat.is_special, marks)):
            params = sampling.showing_special_tokens(params)
        ids = await model.chat.prompt(
            request.messages,
            self._use.told,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            extra=request.chat_template_kwargs,
            documents=request.documents,
        )
        self._opening = self._opening_after(ids)
        await job.prepare(
            model,
            cut([(None, ids)], request.truncate_prompt_tokens, model.room(params)),
            params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            opening=self._opening,
            stream=bool(request.stream),
            called={
                "prompt": "messages",
                "max_tokens": sampling.most_field(request),
                "structured_outputs": structure_field(request),
            },
        )

    def _opening_after(self, prompt: Sequence[int]) -> Opening:
        if self._thoughts == "none":
            return Opening.AFTER
        if self._request.continue_final_message:
            before = str(self._request.messages[-1].content)
            return Opening.INSIDE if before.rfind(BEGIN) > before.rfind(END) else Opening.AFTER
        end = self._model.tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
        return opening(self._thoughts, end)

    def _told(self) -> AnswerReader:
        return AnswerReader(self._use, ReasoningParser(self._opening))

    async def whole(self) -> ChatCompletion:
        """The answer."""
        (output,) = await self._job.finished()
        choices = []
        for now in output.outputs:
            told = self._told()
            delta = told.take(now)
            message = AnswerMessage(role="assistant", content=delta.content or None, refusal=None)
            if delta.reasoning:
                message.reasoning_content = message.reasoning = delta.reasoning
            if delta.calls:
                message.tool_calls = [_call(call) for call in delta.calls]
            elif not delta.content:
                message.content = ""
            choice = ChatChoice(
                index=now.index,
                message=message,
                logprobs=self._logprobs(now.token_ids, now.logprobs),
                finish_reason=self._reason(now, told),
                stop_reason=now.stop_reason,
            )
            if self._request.return_token_ids:
                choice.token_ids = list(now.token_ids)
            choices.append(choice)
        answer = ChatCompletion(
            **self._head("chat.completion"), choices=choices, usage=self._job.usage()
        )
        if self._request.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(output, self._model.text_of)
        if self._request.return_token_ids:
            answer.prompt_token_ids = list(output.prompt_token_ids)
        return answer

    async def stream(self) -> AsyncGenerator[ChatChunk, None]:
        """The answer in pieces; the usage in one more, where it was asked for."""
        usage = StreamUsage(self._request, self._job.usage)
        with_ids = bool(self._request.return_token_ids)
        told = [self._told() for _ in range(self._request.n or 1)]

        def chunk(now: CompletionOutput, delta: AnswerMessage, **fields: Any) -> ChatChunk:
            choice = ChunkChoice(
                **{"index": now.index, "delta": delta, "logprobs": None, "finish_reason": None}
                | fields
            )
            head = self._head("chat.completion.chunk")
            return ChatChunk(**head, choices=[choice], **usage.of_event())

        async with contextlib.aclosing(self._job.outputs()) as outputs:
            async for _, output in outputs:
                for now in output.outputs:
                    known = told[now.index]
                    if known.ended:
                        continue
                    if not known.begun:
                        begin = chunk(now, AnswerMessage(role="assistant", content=""))
                        if with_ids:
                            begin.prompt_token_ids = list(output.prompt_token_ids)
                        yield begin
                    first = known.num_tokens
                    ids, messages = list(now.token_ids[first:]), _messages(known.take(now))
                    about: dict[str, Any] = {"token_ids": ids} if with_ids else {}
                    about["logprobs"] = self._logprobs(ids, now.logprobs and now.logprobs[first:])
                    if not messages and ids and any(about.values()):
                        messages = [AnswerMessage(content="")]
                    for message in messages:
                        yield chunk(now, message, **about)
                        about = {}
                    if known.ended:
                        yield chunk(
                            now,
                            AnswerMessage(),
                            finish_reason=self._reason(now, known),
                            stop_reason=now.stop_reason,
                        )
        if usage.wanted:
            head = self._head("chat.completion.chunk")
            yield ChatChunk(**head, choices=[], usage=usage.of_end())

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": kind,
            "created": self._job.created,
            "model": self._job.service.options.names[0],
        }

    def _reason(self, now: CompletionOutput, told: AnswerReader) -> FinishReason:
        if now.finish_reason == "length":
            return "length"
        return self._use.finish_reason if told.parser.num_calls else "stop"

    def _logprobs(
        self, ids: Sequence[int], entries: Sequence[Logprobs] | None
    ) -> ChatLogprobs | None:
        if not self._request.logprobs or entries is None:
            return None
        count = self._request.top_logprobs or 0
        content = [
            TokenLogprob(
                **self._candidate(token, entry[token].logprob),
                top_logprobs=[
                    TopLogprob(**self._candidate(i, p)) for i, p in likeliest(entry, count)
                ],
            )
            for token, entry in zip(ids, entries, strict=True)
        ]
        return ChatLogprobs(content=content)

    def _candidate(self, token: int, logprob: float) -> dict[str, Any]:
        text_of, as_id = self._model.text_of, self._request.return_tokens_as_token_ids
        return {
            "token": text_of.name(token, as_id),
            "logprob": logprob,
            "bytes": list(text_of.bytes(token)),
        }


def _messages(delta: Delta) -> list[AnswerMessage]:
    messages = []
    if delta.reasoning:
        messages.append(AnswerMessage(reasoning_content=delta.reasoning, reasoning=delta.reasoning))
    if delta.content:
        messages.append(AnswerMessage(content=delta.content))
    calls = [_call(call, streamed=True) for call in delta.calls]
    return [*messages, *([AnswerMessage(tool_calls=calls)] if calls else [])]


def _call(call: CallDelta, *, streamed: bool = False) -> Call:
    told: dict[str, Any] = {"index": call.index} if streamed else {}
    if call.id is None:
        return Call(**told, function=CalledFunction(arguments=call.arguments))
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return Call(**told, id=call.id, type="function", function=function)
