"""OpenAI Chat Completions: answers out, whole and in chunks.

Whole answers are built through the openai package's models. Chunks are plain dictionaries, since one is made
for every few tokens; the tests hold them against the same models.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types.chat import ChatCompletion

from model.tokenizer import K3Tokenizer
from service.channels import CallArguments, CallEnd, CallStart, ReasoningDelta, TextDelta
from service.conversation import Completion, Usage
from service.errors import ServiceError
from service.generation import TokenLogprob
from service.logprobs import logprob_body
from service.reader import Step


def error_body(error: ServiceError) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's shape of the token counts, with the cached tokens by tier beside it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": {
                "device": usage.cached_device_tokens,
                "host": usage.cached_host_tokens,
                "storage": usage.cached_storage_tokens,
            },
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class ChatAnswer:
    """One answer. `id` and `model` are what every part of it carries."""

    def __init__(self, id: str, model: str, tokenizer: K3Tokenizer, *, include_usage: bool) -> None:
        self._head: dict[str, Any] = {"id": id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._include_usage = include_usage

    def whole(self, completion: Completion, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        """The answer in one piece; `logprobs` None when they were not asked for."""
        message = completion.message()
        if not completion.calls:
            message["content"] = completion.text  # clients expect null beside tool calls only
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": completion.finish,
            "logprobs": None if logprobs is None else self._logprobs(logprobs),
        }
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage_body(completion.usage),
        }
        return ChatCompletion.model_validate(body).model_dump(mode="json", exclude_unset=True)

    def first_chunk(self) -> dict[str, Any]:
        """What a stream opens with."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, step: Step) -> Iterator[dict[str, Any]]:
        """The chunks of one step. Log probabilities go with the first of its text."""
        logprobs: Sequence[TokenLogprob] | None = step.logprobs or None
        for event in step.events:
            match event:
                case ReasoningDelta(text):
                    yield self._chunk({"reasoning_content": text})
                case TextDelta(text):
                    yield self._chunk({"content": text}, logprobs=logprobs)
                    logprobs = None
                case CallStart(index, id, name):
                    function = {"name": name, "arguments": ""}
                    call = {"index": index, "id": id, "type": "function", "function": function}
                    yield self._chunk({"tool_calls": [call]})
                case CallArguments(index, fragment):
                    yield self._chunk({"tool_calls": [{"index": index, "function": {"arguments": fragment}}]})
                case CallEnd():
                    pass

    def last_chunks(self, completion: Completion) -> Iterator[dict[str, Any]]:
        """The finish reason, then the usage when it was asked for."""
        yield self._chunk({}, finish_reason=completion.finish)
        if self._include_usage:
            yield {
                **self._head,
                "object": "chat.completion.chunk",
                "choices": [],
                "usage": usage_body(completion.usage),
            }

    def _chunk(
        self,
        delta: Mapping[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if logprobs is not None:
            choice["logprobs"] = self._logprobs(logprobs)
        chunk: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [logprob_body(self._tokenizer, item) for item in logprobs],
            "refusal": None,
        }
