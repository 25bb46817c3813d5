"""What the page answers with: JSON that every browser can read, and errors with the HTTP status that fits."""

import json
import math
from typing import Any

from starlette.responses import Response

from shoal import errors

# The HTTP status of each gRPC status that errors have; `_OTHERWISE` goes before it.
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
_OTHERWISE: dict[type[errors.ShoalError], int] = {errors.MessageTooLarge: 413}


def status_of(error: errors.ShoalError) -> int:
    """The HTTP status of an error."""
    return _OTHERWISE.get(type(error), _STATUS[error.status])


def failure(error: errors.ShoalError) -> Response:
    """An error, as `{code, message}`."""
    return answer(encode(told(error)), status_of(error))


def answer(body: bytes, status: int = 200) -> Response:
    """JSON that was encoded."""
    return Response(body, status, media_type="application/json")


def told(error: errors.ShoalError) -> dict[str, str]:
    """The record of an error."""
    return {"code": error.code, "message": error.message}


def encode(record: Any) -> bytes:
    """JSON, in ASCII. NaN and infinities, which JSON has no word for, become null: a loss may well be one."""
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


__all__ = ["answer", "encode", "failure", "status_of", "told"]
