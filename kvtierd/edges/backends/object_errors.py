"""What an object store's failure means, in words of our own.

obstore's errors are told apart by class name (so that the package need not be there), by the HTTP status and
error code that they quote, and by the names of Rust's error kinds. Of their text, which holds whole URLs and
bodies of answers, nothing is passed on but such a status and code: a signed URL is a secret.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from kvtierd.core.stimuli import Status


class Meaning(enum.Enum):
    """What a failed request says of the block."""

    ABSENT = enum.auto()
    PRESENT = enum.auto()
    NO_SPACE = enum.auto()
    EMPTY_RANGE = enum.auto()
    UNSUPPORTED = enum.auto()
    UNKNOWN = enum.auto()


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed request. ``transient``: worth another try after a while."""

    meaning: Meaning
    reason: str
    transient: bool = False

    @property
    def status(self) -> Status:
        """How a block's operation ends that met this."""
        if self.meaning is Meaning.ABSENT:
            return Status.GONE
        return Status.FULL if self.meaning is Meaning.NO_SPACE else Status.FAILED


class StoreFailed(Exception):
    """A request failed for good (its tries are used up); never leaves the backend."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


_HTTP = re.compile(r"non-2xx status code: (\d{3})|\bstatus: (\d{3}),")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>|\bcode: \"(\w{1,64})\"")
_CREDENTIALS = re.compile(r"\[credentials\] ([\w ./:'-]{1,300})")
_METADATA_SERVICE = re.compile(r"169\.254\.|metadata\.google|\[fd00:ec2")
_TLS = re.compile(
    r"InvalidCertificate\(\s*(\w+)|\b(InvalidMessage|HandshakeFailure|AlertReceived|PeerIncompatible|InvalidDnsName)\b"
)
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "AccountIsDisabled"}
_THROTTLED = {"SlowDown", "ServerBusy", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
_DENIED = (Meaning.UNKNOWN, "access denied", ": check the credentials and the bucket's policy")
_REDIRECTED = (Meaning.UNKNOWN, "redirected", ": check region and endpoint")
_ANSWERS = {
    301: _REDIRECTED,
    302: _REDIRECTED,
    307: _REDIRECTED,
    308: _REDIRECTED,
    401: _DENIED,
    403: _DENIED,
    404: (Meaning.ABSENT, "not there", ""),
    412: (Meaning.PRESENT, "there already", ""),
    416: (Meaning.EMPTY_RANGE, "shorter than asked for", ""),
    501: (Meaning.UNSUPPORTED, "the store does not know this operation", ""),
}
_TRANSIENT_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
# From the most telling to the least; the first that occurs in the text says what broke.
_TRANSPORT = (
    ("dns error", "the endpoint's name cannot be resolved"),
    ("ConnectionRefused", "the endpoint refuses connections"),
    ("NetworkUnreachable", "the endpoint's network cannot be reached"),
    ("HostUnreachable", "the endpoint's host cannot be reached"),
    ("TimedOut", "no answer in time"),
    ("kind: Timeout", "no answer in time"),
    ("UnexpectedEof", "the answer was cut short"),
    ("IncompleteBody", "the answer was cut short"),
    ("ConnectionReset", "the connection was reset"),
    ("kind: Connect", "cannot connect to the endpoint"),
    ("kind: Interrupted", "the connection broke"),
    ("kind: Request", "the connection broke"),
    ("kind: Decode", "the answer cannot be understood"),
)


def explain(error: Exception) -> Fault:
    """Return what an exception of obstore, or of the system under it, means."""
    text = str(error)
    match = _HTTP.search(text)
    status = int(match[1] or match[2]) if match is not None else 0
    code = (found[1] or found[2]) if (found := _CODE.search(text)) is not None else ""
    if _METADATA_SERVICE.search(text) is not None:
        return Fault(Meaning.UNKNOWN, "no credentials: no variables, and no metadata service gave any")
    if (told := _CREDENTIALS.search(text)) is not None:
        return Fault(Meaning.UNKNOWN, told[1].strip())
    if status:
        return _answered(status, code, type(error).__name__)
    if code:  # of one object in a bulk request that was answered as a whole with success
        return Fault(Meaning.UNKNOWN, f"refused ({code})")
    return _unanswered(error, text)


def _answered(status: int, code: str, name: str) -> Fault:
    """Explain an HTTP answer that is not a success."""
    said = f"{status} {code}".strip()
    if code in _NO_BUCKET:
        return Fault(Meaning.UNKNOWN, f"the bucket does not exist ({said})")
    if status == 507 or "Quota" in code or "StorageFull" in code:
        return Fault(Meaning.NO_SPACE, f"the store has no room ({said})")
    if status == 429 or code in _THROTTLED:
        return Fault(Meaning.UNKNOWN, f"throttled ({said})", transient=True)
    if name == "AlreadyExistsError":
        status = 412
    if status in _ANSWERS:
        meaning, words, advice = _ANSWERS[status]
        return Fault(meaning, f"{words} ({said}){advice}")
    if status in _TRANSIENT_STATUS:
        return Fault(Meaning.UNKNOWN, f"the store's own error ({said})", transient=True)
    return Fault(Meaning.UNKNOWN, f"refused ({said})")


def _unanswered(error: Exception, text: str) -> Fault:
    """Explain a request that got no HTTP answer, or a store that is no HTTP service."""
    name = type(error).__name__
    if isinstance(error, FileNotFoundError):
        return Fault(Meaning.ABSENT, "not there")
    if name in ("AlreadyExistsError", "PreconditionError"):
        return Fault(Meaning.PRESENT, "there already")
    if name in ("NotSupportedError", "NotImplementedError"):
        return Fault(Meaning.UNSUPPORTED, "the store does not know this operation")
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Fault(Meaning.UNKNOWN, "access denied: check the credentials")
    if "BareRedirect" in text:
        return Fault(Meaning.UNKNOWN, "redirected: check region and endpoint")
    if (tls := _TLS.search(text)) is not None:
        return Fault(
            Meaning.UNKNOWN,
            f"TLS with the endpoint failed ({tls[1] or tls[2]}): check ca_bundle and endpoint",
        )
    if "source: Range {" in text:  # of stores without HTTP
        return Fault(Meaning.EMPTY_RANGE, "shorter than asked for")
    for sign, reason in _TRANSPORT:
        if sign in text:
            return Fault(Meaning.UNKNOWN, reason, transient=True)
    return Fault(Meaning.UNKNOWN, name)
