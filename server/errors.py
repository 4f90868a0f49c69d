"""Every error a client can meet.

ApiError
├── BadRequest        400  the body is not what it should be
│   └── BadGrammar    400  a schema, regex or grammar that cannot be compiled or followed
├── BadHead           400  the request's head is no HTTP; 431 where it is too long, 408 where it came too slowly
├── Unauthorized      401  an API key is asked for, and none or a wrong one came
├── OriginRefused     403  a web page of another origin than --cors-origin names asks whether it may call
├── Unprocessable     422  a field is wrong or unknown
├── NeverFits         422  could not be served even by an empty pool; carries the numbers
├── NotFound          404  there is nothing at this path
│   └── ModelNotFound 404  the model asked for is not the one served
├── MethodNotAllowed  405  the path is there, but not with this method
├── BodyTimeout       408  the body was not complete in time
├── BodyTooLarge      413  the body has more than --max-body bytes
├── UnsupportedMediaType 415  the body is compressed
├── QueueFull         429  as many wait as may; with Retry-After by the ledger
├── Unavailable       503  draining, or the engine is dead or stuck; with Retry-After
├── SlowReader        in the stream: the client did not read for too long
└── EngineFailure     500  the server's own fault; in the stream once that has begun

Under /v1 a wrong field is 400 and not 422, as OpenAI's clients expect, and a prompt that does not fit has their code.
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """status, type and code of the error form {"error": {"message", "type", "param", "code", ...numbers}}."""

    status = 500
    type = "server_error"
    code = "internal_error"
    code_v1: str | None = None  # where OpenAI's API has another word for it

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
    """The error form as a JSON schema."""
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
        return {"Connection": "close"}  # the rest of the body is not wanted


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
    """The code of every error there is."""
    kinds: list[type[ApiError]] = [ApiError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return sorted({kind.code for kind in kinds})
