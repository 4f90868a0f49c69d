"""Every error a client can get.

ApiError
├── BadRequest        400  the body is not valid
│   └── BadGrammar    400  a schema, regex or grammar that cannot be compiled or followed
├── BadHead           400  the request head is not HTTP; 431 if it is too long, 408 if it is too slow
├── Unauthorized      401  the API key is missing or wrong
├── OriginRefused     403  CORS preflight from an origin that is not in --cors-origin
├── Unprocessable     422  a field is wrong or unknown
├── NeverFits         422  too long for the context or the whole pool; carries the numbers
├── NotFound          404  no such path or request
│   └── ModelNotFound 404  another model than the one served
├── MethodNotAllowed  405  the path exists, but not with this method
├── BodyTimeout       408  the body was not complete in time
├── BodyTooLarge      413  the body exceeds --max-body
├── UnsupportedMediaType 415  the body is compressed
├── QueueFull         429  the queue is full; with Retry-After
├── Unavailable       503  draining, or the engine is dead or stuck; with Retry-After
├── SlowReader        in the stream: the client did not read for too long
└── EngineFailure     500  the server's own fault; in the stream once that has begun

Under /v1, 422 becomes 400, as OpenAI's clients expect, and NeverFits has OpenAI's code.
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """Becomes {"error": {"message", "type", "param", "code", ...numbers}} with the class's status, type and code."""

    status = 500
    type = "server_error"
    code = "internal_error"
    code_v1: str | None = None  # if OpenAI's API has another one

    def __init__(self, message: str, *, param: str | None = None, **numbers: Any) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.numbers = numbers

    def body(self, *, v1: bool = False) -> dict[str, Any]:
        code = (v1 and self.code_v1) or self.code
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": code} | self.numbers}

    def status_for(self, *, v1: bool) -> int:
        return 400 if v1 and self.status == 422 else self.status

    def headers(self) -> dict[str, str]:
        seconds = self.numbers.get("retry_after_s")
        return {} if seconds is None else {"Retry-After": str(seconds)}


def error_schema() -> dict[str, Any]:
    """The JSON schema of an error response."""
    text = {"type": "string"}
    maybe = {"type": ["string", "null"]}
    fields = {"message": text, "type": text, "param": maybe, "code": text, "retry_after_s": {"type": "number"}}
    inner = {"type": "object", "required": ["message", "type", "param", "code"], "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}


class BadRequest(ApiError):
    status, type, code = 400, "invalid_request_error", "bad_request"


class BadHead(ApiError):
    status, type, code = 400, "invalid_request_error", "bad_head"


class Unauthorized(ApiError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class OriginRefused(ApiError):
    status, type, code = 403, "invalid_request_error", "origin_refused"


class BadGrammar(BadRequest):
    code = "bad_grammar"


class Unprocessable(ApiError):
    status, type, code = 422, "invalid_request_error", "invalid_value"


class NeverFits(ApiError):
    status, type, code = 422, "invalid_request_error", "never_fits"
    code_v1 = "context_length_exceeded"


class NotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(ApiError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTimeout(ApiError):
    status, type, code = 408, "invalid_request_error", "body_timeout"

    def headers(self) -> dict[str, str]:
        return {"Connection": "close"}


class BodyTooLarge(ApiError):
    status, type, code = 413, "invalid_request_error", "body_too_large"

    def headers(self) -> dict[str, str]:
        return {"Connection": "close"}  # the rest of the body is not read


class UnsupportedMediaType(ApiError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class QueueFull(ApiError):
    status, type, code = 429, "overloaded_error", "queue_full"


class Unavailable(ApiError):
    status, type, code = 503, "overloaded_error", "unavailable"


class SlowReader(ApiError):
    status, type, code = 408, "invalid_request_error", "slow_reader"


class EngineFailure(ApiError):
    status, type, code = 500, "server_error", "engine_failure"


def codes() -> list[str]:
    """The codes of all errors."""
    kinds: list[type[ApiError]] = [ApiError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return sorted({kind.code for kind in kinds})
