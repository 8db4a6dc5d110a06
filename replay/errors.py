"""What replay raises, as a tree.

ReplayError
  TraceError        a trace can't be read: names the file, the entry and the field
  EndpointError     the endpoint can't be used at all: unreachable, no usage, no fitting words
  RequestFailed     one request failed: counted, the replay goes on
"""

from pathlib import Path


class ReplayError(Exception):
    """The replay can't go on; the message is for the user."""


class TraceError(ReplayError):
    """A trace is malformed or unreadable.

    `where` is the path inside the file, such as `requests[3].requests[0].in`.
    """

    def __init__(self, path: Path, where: str, problem: str) -> None:
        self.path = path
        self.where = where
        self.problem = problem
        super().__init__(f"{path}: {where}: {problem}" if where else f"{path}: {problem}")


class EndpointError(ReplayError):
    """The endpoint can't be measured; says what was tried and what to do."""


class RequestFailed(ReplayError):
    """One request failed. `reason` is short and the same for all failures of its kind."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)
