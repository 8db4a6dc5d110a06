"""What can go wrong with a request, apart from any API's way to say it.

    ServiceError
    ├── InvalidRequest            400  a field is missing, mistyped, out of range or not supported
    │   ├── ContextTooLong        400  the prompt leaves no room for an answer
    │   ├── BodyTooLarge          413
    │   └── BodyStalled           408  the client stopped sending within its body
    ├── AuthenticationFailed      401
    ├── NotFound                  404
    ├── MethodNotAllowed          405
    ├── TooManyTurns              429  the tenant's limit of concurrent turns is reached
    ├── QuotaExceeded             429  the tenant's requests, tokens or bytes are used up
    ├── LedgerDown                503  what the request refers to is in the ledger, which does not answer
    └── EngineError
        ├── EngineOverloaded      503  the engine's queue is full
        │   └── NoPlace           503  no place for the session became free in time
        ├── EngineUnavailable     503  no connection, or the engine is starting or stopping
        └── EngineFailed          502  the engine broke off, or answered something that makes no sense

Each API module renders them in its own shape (`service.chat.error_body`). Messages are ours alone: what an
engine says holds file paths and token ids, so it goes to the log and never into one of these.
"""

from typing import ClassVar


class ServiceError(Exception):
    """A failure that is answered with an HTTP status, or inside a stream that has begun.

    `kind` is OpenAI's `error.type`, `code` a word that clients match on, `param` the path of the field at
    fault (`messages[2].content`), `retry_after_s` the whole seconds of the Retry-After header.
    """

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def message(self) -> str:
        """What went wrong and what to do about it."""
        return str(self)


class InvalidRequest(ServiceError):
    """A request that no retry mends: the message names the field and the remedy."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLong(InvalidRequest):
    """The prompt leaves no room for an answer.

    Agents decide by these very words ("maximum context length") and this code to compact their history.
    `limit_tokens` is the longest prompt that is taken; by default what the context holds.
    """

    def __init__(self, *, context_tokens: int, prompt_tokens: int, limit_tokens: int | None = None) -> None:
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, your messages "
            f"resulted in {prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
        )
        self.limit_tokens = context_tokens if limit_tokens is None else limit_tokens
        self.prompt_tokens = prompt_tokens


class BodyTooLarge(InvalidRequest):
    """The body is longer than the gateway reads."""

    status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"The request body is larger than {limit_bytes} bytes. Send less, or raise --max-body-mib.",
            code="request_too_large",
        )


class BodyStalled(InvalidRequest):
    """The client stopped sending before the body was complete."""

    status = 408

    def __init__(self, stall_s: float) -> None:
        super().__init__(
            f"Nothing more of the request body came for {stall_s:g} s. Send it in one go.",
            code="request_timeout",
        )


class AuthenticationFailed(ServiceError):
    """No key, or one that belongs to no tenant."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"

    def __init__(self, *, key_sent: bool) -> None:
        super().__init__(
            "Incorrect API key provided."
            if key_sent
            else "No API key provided. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        )


class NotFound(ServiceError):
    """No such route or model."""

    status = 404
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str = "not_found") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class MethodNotAllowed(ServiceError):
    """The route exists, but not for this method."""

    status = 405
    kind = "invalid_request_error"
    code = "method_not_allowed"


class TooManyTurns(ServiceError):
    """A tenant has as many turns running as it may."""

    status = 429
    kind = "rate_limit_error"
    code = "concurrent_turns_exceeded"
    retry_after_s = 1

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"All {limit} turns that this API key may run at once are running. Retry when one has ended."
        )


class QuotaExceeded(ServiceError):
    """A tenant has used up what it may have of something; `quota` is its name in the tenants file."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, quota: str, limit: int, retry_after_s: int) -> None:
        remedy = (
            "Delete sessions that are over (DELETE /v1/sessions/ID), or wait until old turns expire."
            if quota == "max_turn_bytes"
            else f"Retry after {retry_after_s} s."
        )
        super().__init__(f"This API key's {quota}, {limit}, is used up. {remedy}")
        self.quota = quota
        self.retry_after_s = retry_after_s


class LedgerDown(ServiceError):
    """What the request refers to is in the ledger, and the ledger does not answer."""

    status = 503
    code = "ledger_unavailable"
    retry_after_s = 2

    def __init__(self) -> None:
        super().__init__(
            "Stored turns can't be read now. Retry after the time in the Retry-After header, or send the "
            "conversation itself."
        )


class EngineError(ServiceError):
    """The engine did not do its part."""

    kind = "server_error"


class EngineOverloaded(EngineError):
    """The engine's queue is full: the same request may pass in a moment."""

    status = 503
    kind = "overloaded_error"
    code = "overloaded"
    retry_after_s = 2

    def __init__(self) -> None:
        super().__init__("The engine is overloaded. Retry after the time in the Retry-After header.")


class NoPlace(EngineOverloaded):
    """More sessions are live than the engine holds, and none gave its place up in time."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__()
        self.retry_after_s = retry_after_s


class EngineUnavailable(EngineError):
    """The engine can't be reached, is starting, or is stopping."""

    status = 503
    code = "engine_unavailable"
    retry_after_s = 5

    def __init__(self) -> None:
        super().__init__("The engine is not available. Retry after the time in the Retry-After header.")


class EngineFailed(EngineError):
    """The engine broke off within a turn, or its answer makes no sense; the turn is not recorded."""

    status = 502
    code = "engine_failed"
    retry_after_s = 1

    def __init__(self) -> None:
        super().__init__(
            "The engine broke off before the turn was complete. The turn was not recorded; send it again."
        )
