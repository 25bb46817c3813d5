"""Responses of the page: JSON that every browser can parse, and errors with their HTTP status."""

import json
import math
from typing import Any

from starlette.responses import Response

from shoal import errors
from shoal._limits import count_refusal

# The HTTP status of each gRPC status of an error. `_OTHERWISE` has precedence.
_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "ABORTED": 409,
    "CANCELLED": 409,
    "INTERNAL": 500,
    "DATA_LOSS": 500,
    "UNAVAILABLE": 503,
    "RESOURCE_EXHAUSTED": 503,
    "DEADLINE_EXCEEDED": 504,
}
_OTHERWISE: dict[type[errors.ShoalError], int] = {errors.MessageTooLarge: 413, errors.LimitExceeded: 413}


def status_of(error: errors.ShoalError) -> int:
    """Returns the HTTP status of an error."""
    return _OTHERWISE.get(type(error), _STATUS[error.status])


def failure(error: errors.ShoalError) -> Response:
    """Returns the response for an error, `{code, message}`, and counts the error if it names a limit."""
    count_refusal(error)
    return answer(encode(error_record(error)), status_of(error))


def answer(body: bytes, status: int = 200) -> Response:
    """Returns the response for encoded JSON."""
    return Response(body, status, media_type="application/json")


def error_record(error: errors.ShoalError) -> dict[str, str]:
    """Returns the record of an error."""
    return {"code": error.code, "message": error.message}


def encode(record: Any) -> bytes:
    """Encodes a record as JSON in ASCII. NaN and infinities become null; a loss may be one of them."""
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(record), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value


__all__ = ["answer", "encode", "error_record", "failure", "status_of"]
