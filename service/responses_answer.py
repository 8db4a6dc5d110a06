"""OpenAI Responses: answers out. One builder makes the events of a stream and the items of a whole answer.

Events are plain dictionaries, since one is made for every few tokens; the tests hold them against the models
of the openai package. Items open and close in the order in which the model writes its channels: reasoning,
message, function calls. A message that has neither text nor calls still has an empty text, so that a client
which sends everything back shows that there was a turn.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from model.tokenizer import K3Tokenizer
from service.channels import CallArguments, CallEnd, CallStart, ReasoningDelta, TextDelta
from service.conversation import Completion, Usage
from service.encryption import ReasoningSeal
from service.errors import ServiceError
from service.generation import TokenLogprob
from service.logprobs import logprob_body
from service.reader import Step
from service.responses_items import Item
from service.responses_request import ResponsesRequest

Event = dict[str, Any]


def response_id(turn: str) -> str:
    """The id of the response that a turn is."""
    return f"resp_{turn}"


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's shape of the token counts, with the cached tokens by tier beside it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": {
                "device": usage.cached_device_tokens,
                "host": usage.cached_host_tokens,
                "storage": usage.cached_storage_tokens,
            },
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponsesAnswer:
    """One response. `turn` is the key of its turn; `seal` is there when reasoning is to be sealed."""

    def __init__(
        self,
        turn: str,
        model: str,
        request: ResponsesRequest,
        tokenizer: K3Tokenizer,
        seal: ReasoningSeal | None,
    ) -> None:
        self._turn = turn
        self._request = request
        self._tokenizer = tokenizer
        self._seal = seal
        self._sequence = 0
        self._output: list[Item] = []
        self._open: Item | None = None
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._head: dict[str, Any] = {
            "id": response_id(turn),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **request.shown,
        }

    def first_events(self) -> Iterator[Event]:
        """What a stream opens with."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._body("in_progress"))

    def events(self, step: Step) -> Iterator[Event]:
        """The events of one step. Log probabilities go with the first of its text."""
        logprobs: Sequence[TokenLogprob] = step.logprobs
        for event in step.events:
            match event:
                case ReasoningDelta(text):
                    yield from self._enter("reasoning")
                    self._text.append(text)
                    kind = "reasoning_summary_text" if self._request.summary else "reasoning_text"
                    yield self._item_event(f"{kind}.delta", **self._reasoning_place(), delta=text)
                case TextDelta(text):
                    yield from self._enter("message")
                    self._text.append(text)
                    shown = [logprob_body(self._tokenizer, item) for item in logprobs]
                    self._logprobs += shown
                    logprobs = ()
                    yield self._item_event("output_text.delta", content_index=0, delta=text, logprobs=shown)
                case CallStart(_, id, name):
                    yield from self._leave("completed")
                    yield from self._open_call(id, name)
                case CallArguments(_, fragment):
                    self._text.append(fragment)
                    yield self._item_event("function_call_arguments.delta", delta=fragment)
                case CallEnd():
                    yield from self._leave("completed")

    def last_events(self, completion: Completion) -> Iterator[Event]:
        """Close what is open; the last event, with the whole response, comes from `ending`."""
        yield from self._leave("incomplete" if completion.finish == "length" else "completed")
        if not any(item["type"] in ("message", "function_call") for item in self._output):
            yield from self._enter("message")
            yield from self._leave("incomplete" if completion.finish == "length" else "completed")

    def body(self, completion: Completion) -> dict[str, Any]:
        """The whole response, once `last_events` has been taken."""
        cut = completion.finish == "length"
        return self._body(
            "incomplete" if cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            completed_at=None if cut else int(time.time()),
            usage=usage_body(completion.usage),
        )

    def ending(self, body: Mapping[str, Any]) -> Event:
        """The event that ends a stream with a response that came to its end."""
        return self._event(f"response.{body['status']}", response=body)

    def failure(self, error: ServiceError) -> Event:
        """The event that ends a stream in which the engine broke off."""
        code = "rate_limit_exceeded" if error.status in (429, 503) else "server_error"
        body = self._body("failed", error={"code": code, "message": error.message})
        return self._event("response.failed", response=body)

    def cancellation(self) -> Event:
        """The event that ends a stream which another request has cancelled."""
        return self._event("response.incomplete", response=self.cancelled())

    def cancelled(self) -> dict[str, Any]:
        """The response as far as it came before it was cancelled."""
        return self._body("cancelled")

    def _body(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output if self._open is None else [*self._output, self._open],
            "usage": None,
            **more,
        }

    def _enter(self, kind: str) -> Iterator[Event]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._leave("completed")
        number = sum(item["type"] == kind for item in self._output)
        suffix = f"_{number}" if number else ""
        if kind == "reasoning":
            item: Item = {"id": f"rs_{self._turn}{suffix}", "type": kind, "summary": []}
            if self._request.sealed:
                item["encrypted_content"] = None
        else:
            item = {"id": f"msg_{self._turn}{suffix}", "type": kind, "role": "assistant", "content": []}
        yield self._add(item)
        if kind == "reasoning":
            name = "reasoning_summary_part" if self._request.summary else "content_part"
            yield self._item_event(f"{name}.added", **self._reasoning_place(), part=self._reasoning_part(""))
        else:
            yield self._item_event("content_part.added", content_index=0, part=_text_part("", []))

    def _open_call(self, id: str, declared: str) -> Iterator[Event]:
        name, namespace = self._request.tools.name(declared)
        number = sum(item["type"] == "function_call" for item in self._output)
        item: Item = {
            "id": f"fc_{self._turn}_{number}",
            "type": "function_call",
            "call_id": id,
            "name": name,
            "arguments": "",
        }
        if namespace is not None:
            item["namespace"] = namespace
        yield self._add(item)

    def _add(self, item: Item) -> Event:
        item["status"] = "in_progress"
        self._open, self._text, self._logprobs = item, [], []
        return self._event("response.output_item.added", output_index=len(self._output), item=dict(item))

    def _leave(self, status: str) -> Iterator[Event]:
        if (item := self._open) is None:
            return
        text = "".join(self._text)
        match item["type"]:
            case "reasoning":
                part = self._reasoning_part(text)
                place = self._reasoning_place()
                if self._request.summary:
                    yield self._item_event("reasoning_summary_text.done", **place, text=text)
                    yield self._item_event("reasoning_summary_part.done", **place, part=part)
                    item["summary"] = [part]
                else:
                    yield self._item_event("reasoning_text.done", **place, text=text)
                    yield self._item_event("content_part.done", **place, part=part)
                    item["content"] = [part]
                if self._request.sealed and self._seal is not None:
                    item["encrypted_content"] = self._seal.seal(text)
            case "message":
                part, logprobs = _text_part(text, self._logprobs), self._logprobs
                yield self._item_event("output_text.done", content_index=0, text=text, logprobs=logprobs)
                yield self._item_event("content_part.done", content_index=0, part=part)
                item["content"] = [part]
            case _:
                item["arguments"] = text
                yield self._item_event("function_call_arguments.done", name=item["name"], arguments=text)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None

    def _reasoning_place(self) -> dict[str, int]:
        return {"summary_index": 0} if self._request.summary else {"content_index": 0}

    def _reasoning_part(self, text: str) -> dict[str, Any]:
        return {"type": "summary_text" if self._request.summary else "reasoning_text", "text": text}

    def _item_event(self, kind: str, **more: Any) -> Event:
        assert self._open is not None, "an item is open"
        return self._event(
            f"response.{kind}", item_id=self._open["id"], output_index=len(self._output), **more
        )

    def _event(self, kind: str, **more: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return event


def _text_part(text: str, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
