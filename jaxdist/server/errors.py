"""What a client is told when a request cannot be served: OpenAI's error object.

`{"error": {"message", "type", "param", "code"}}`. A message names the rule and the fix, never what
the client sent: that may be large, or not for the log.
"""

import re
from collections.abc import Container, Mapping
from typing import Any

from pydantic import ValidationError

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"} | {
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
# What pydantic says where a union's members all refuse; each member's kind is named once.
_KINDS = re.compile(r"Input should be (?:an? )?(?:valid )?(.*)")


class APIError(Exception):
    """A request that is refused.

    Attributes:
        status: HTTP's status code.
        message: The rule and the fix.
        param: The field of the request that is wrong.
        code: A word for programs, such as "context_length_exceeded".
        headers: To send besides, such as Retry-After.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The object that is sent."""
        kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def wrong_field(error: ValidationError, names: Container[str]) -> APIError:
    """The first field that pydantic refuses, by name; the value is not repeated.

    names: All fields that requests have. Other words in a place are pydantic's, for the members of
    a union, or the client's, for the keys of an object.
    """

    def path(problem: Any) -> list[str]:
        return [str(p) for p in problem["loc"] if isinstance(p, int) or p in names]

    problems = error.errors(include_url=False, include_context=False, include_input=False)
    field = path(problems[0])[:1]
    deep = max((p for p in problems if path(p)[:1] == field), key=lambda p: len(path(p)))
    reasons = [problem["msg"] for problem in problems if path(problem) == path(deep)]
    kinds = dict.fromkeys(kind[1] for kind in map(_KINDS.fullmatch, reasons) if kind)
    param = ".".join(path(deep))[:200]
    if deep["type"] == "missing":
        message = f"{param} is missing"
    elif kinds:
        message = f"{param} must be {' or '.join(kinds)}"
    else:
        reason = reasons[0].removeprefix("Value error, ")
        message = f"{param}: {reason[:1].lower()}{reason[1:]}" if param else reason
    message = re.sub("dictionary( or instance of [A-Za-z]+)?", "object", message)
    if not param:  # two fields that do not fit together; the message begins with one
        param = next((word for word in re.findall(r"\w+", message)[:1] if word in names), "")
    return APIError(message[:500], param=param or None)


def refused(message: str, code: str | None = None) -> APIError:
    """A value that the engine refuses: its messages begin with the field, as in `top_p=2 must`."""
    named = re.match(r"(?:(?:a text|a token) of )?([a-z_]+)(?:\[|=|:| must | has \d)", message)
    return APIError(message[:1000], param=named[1] if named else None, code=code)
