"""What can go wrong in the engine, and whether trying again makes sense.

Every error carries a `code` that the API passes on, and `retryable`: True when the same request may
succeed later without a change.
"""

from __future__ import annotations


class EngineError(Exception):
    code = "engine_error"
    retryable = False


class InvalidRequest(EngineError, ValueError):
    """The request itself is wrong; `param` names the field. Never retryable."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class NotSupported(InvalidRequest):
    """A known field or option asks for something that this engine does not do."""

    code = "unsupported_value"


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for even one output token, or does not fit where none is asked for.

    The wording is what agents look for before they compact a conversation; it stays as it is.
    """

    code = "context_length_exceeded"

    def __init__(
        self, num_prompt_tokens: int, max_model_len: int, *, num_answer_tokens: int = 1, param: str = "messages"
    ) -> None:
        answer = ", and at least one of them is for the answer" if num_answer_tokens else ""
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens{answer}: "
            f"prompt is too long: {num_prompt_tokens} tokens > {max_model_len - num_answer_tokens} maximum.",
            param=param,
        )


def check_unicode(name: str, text: str | None) -> None:
    """Raises `InvalidRequest` for half a surrogate pair: JSON can hold it, no message between processes can."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} has half of a surrogate pair at character {error.start}", param=name) from error


class ConfigError(EngineError):
    """The engine cannot start with these options; the message names the option and a way out."""

    code = "config_error"


class LoadError(EngineError):
    """A checkpoint cannot be read: names the file, the tensor or field, and the cause."""

    code = "load_error"


class WorkerError(EngineError):
    """A worker process failed, ended, or does not answer; its engine ends with it."""

    code = "worker_failed"


class RequestFailed(EngineError):
    """One request failed inside the engine while the others go on."""

    code = "request_failed"


class EngineAsleep(EngineError):
    """The engine sleeps and was told to refuse requests meanwhile."""

    code = "engine_asleep"
    retryable = True


class EngineDeadError(EngineError):
    """The engine process is gone. Whoever waits on it gets this; a supervisor restarts it."""

    code = "engine_dead"
    retryable = True
