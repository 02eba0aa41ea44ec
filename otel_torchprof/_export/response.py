"""Responses of a receiver, independent of the protocol."""

from __future__ import annotations

import enum
import math
import random
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._process.deadline import Deadline

_LONGEST_TEXT = 300
_TLS_FAULTS = (
    "CERTIFICATE",  # not trusted, expired, of another host, missing, or not accepted
    "Hostname Verification",
    "security handshaker",  # the client's certificate and key cannot be used
    "UNKNOWN_CA",
    "WRONG_VERSION_NUMBER",  # the peer does not speak TLS
    "HTTP_REQUEST",
    "PROTOCOL_VERSION",
    "UNSUPPORTED_PROTOCOL",
    "HANDSHAKE_FAILURE",
    "INSUFFICIENT_SECURITY",
    "UNRECOGNIZED_NAME",
    "ACCESS_DENIED",
    "KEY_VALUES_MISMATCH",
    "PEM",
)
"""Parts of OpenSSL's and BoringSSL's names of what will be the same at the next attempt."""


_NO_RECEIVER = "perhaps what answers there is no receiver of OTLP: see that the endpoint is that of one"
CLOSED = "the exporter is shut down"
"""Reason of the response for messages sent during or after the shutdown."""


class Outcome(enum.Enum):
    """Outcome of a message."""

    ACCEPTED = enum.auto()
    RETRY = enum.auto()
    """Not accepted; a retry may succeed."""
    TOO_LARGE = enum.auto()
    """Not accepted because of its size."""
    REFUSED = enum.auto()
    """Not accepted, and never will be."""


class Response(NamedTuple):
    """The outcome of a message, and details of the response."""

    outcome: Outcome
    reason: str = ""
    """Reason as text; for an accepted message, the receiver's remark."""
    wait: float | None = None
    """Seconds that the receiver asks to wait before the next attempt."""
    rejected_spans: int = 0
    """Number of rejected spans of an accepted message."""
    may_pass: bool = False
    """Whether it was refused only because no time was left for a retry."""
    may_have_arrived: bool = False
    """Whether a message to retry was sent, at least in part, without a response."""
    advice: str = ""
    """Fault in the setup and its fix, if it seems to be wrong."""
    answered: bool = False
    """Whether the endpoint responded to a message that was not accepted, at least by closing the connection."""

    @property
    def text(self) -> str:
        """The reason with the advice, for logs and errors."""
        return f"{self.reason}; {self.advice}" if self.advice else self.reason


def accepted(body: bytes) -> Response:
    """The response of a receiver that accepted the message and said ``body``, a serialized ExportTraceServiceResponse."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        partial = ExportTraceServiceResponse.FromString(body).partial_success
    except DecodeError:
        # The status was success: sending the message again would duplicate its spans.
        return Response(Outcome.ACCEPTED, "the receiver's response cannot be read", advice=_NO_RECEIVER)
    return Response(Outcome.ACCEPTED, one_line(partial.error_message), rejected_spans=max(0, partial.rejected_spans))


def one_line(text: str) -> str:
    """Returns foreign text for a log: on one line, of limited length, and without control characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST_TEXT else line[:_LONGEST_TEXT] + " ..."


def seconds_or_none(value: float) -> float | None:
    """A wait that a receiver named; None where it makes no sense."""
    return max(0.0, value) if math.isfinite(value) else None


def is_tls_fault(reason: str) -> bool:
    """Whether TLS failed for a reason that a retry does not change."""
    return any(fault in reason for fault in _TLS_FAULTS)


def causes(error: BaseException) -> list[BaseException]:
    """The exception and what led to it, down to the bottom."""
    chain = [error]
    while (cause := _cause(chain[-1])) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _cause(error: BaseException) -> BaseException | None:
    # urllib3 wraps an error of TLS without chaining it.
    wrapped = (argument for argument in error.args if isinstance(argument, BaseException))
    return error.__cause__ or error.__context__ or next(wrapped, None)


def root_cause(error: BaseException) -> str:
    """Returns the innermost cause of a transport's exception, as text.

    Includes messages of the system's own errors only: those of higher layers may contain the URL with secrets.
    """
    bottom = causes(error)[-1]
    name = type(bottom).__name__
    systems_own = isinstance(bottom, OSError) and type(bottom).__module__ in {"builtins", "socket", "ssl"}
    return f"{name}: {bottom}" if systems_own else name


# ---- Sending one message until it is accepted, refused permanently, or out of time ----


class Backoff(NamedTuple):
    """Waits between attempts, each twice as long as the one before, up to ``longest``, give or take ``jitter``."""

    first: float = 0.5
    """Seconds, like the other waits."""
    longest: float = 5.0
    jitter: float = 0.2
    """Share of the wait, so that clients that were refused together do not retry together."""
    shortest: float = 0.1
    """Lower limit, even if the receiver asks for less."""

    def wait(self, retries: int, asked: float | None) -> float:
        """Returns the seconds to wait after ``retries`` retries; the wait that the receiver ``asked`` for takes precedence."""
        if asked is not None:
            return max(asked, self.shortest)
        # The exponent is bounded: 2.0 ** 1024 is an OverflowError.
        whole = min(self.longest, self.first * 2.0 ** min(retries, 32))
        return whole * random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311 (nothing secret)


def deliver(
    attempt: Callable[[float], Response],
    *,
    deadline: Deadline,
    wait: Callable[[float], bool],
    backoff: Backoff,
    retrying: Callable[[Response, float], None],
) -> Response:
    """Attempts until the response is final; never answers RETRY.

    Args:
        attempt: sends once, within so many seconds.
        deadline: for everything together. A wait that would pass it is not begun.
        wait: waits so many seconds; True when it was woken because no more is to be sent.
        backoff: how long to wait.
        retrying: called with each wait before it begins.
    """
    retries = 0
    while True:
        response = attempt(deadline.remaining())
        if response.outcome is not Outcome.RETRY:
            return response
        seconds = backoff.wait(retries, response.wait)
        if seconds >= deadline.remaining():
            tried = f"after {retries + 1} attempts, with no time left to wait {seconds:.1f} s for another"
            return _given_up(response, tried)
        retrying(response, seconds)
        if wait(seconds):
            return _given_up(response, "shut down while waiting to try again")
        retries += 1


def _given_up(response: Response, why: str) -> Response:
    return Response(Outcome.REFUSED, f"{response.reason} ({why})", may_pass=True, advice=response.advice)
