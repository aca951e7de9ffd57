"""What is wrong with one request, or with the engine, so that a server can say it in its shape."""

from jaxdist.config.errors import UsageError

BUSY = "rate_limit_exceeded"  # the code of what may be asked again later


class RequestError(UsageError):
    """A request that cannot be served.

    Attributes:
        param: The field that is wrong, by the name of SamplingParams, or "prompt"; None where no
            single one is.
        code: A word for programs, such as "context_length_exceeded".
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


class EngineError(RuntimeError):
    """The engine cannot go on: a step failed (its error is the cause), or it is closed."""
