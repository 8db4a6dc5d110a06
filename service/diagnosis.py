"""What a check of `longhaul doctor` is, and how a list of them is run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class CheckFailed(Exception):
    """A check found a fault: what is wrong, and what to do about it."""

    def __init__(self, detail: str, remedy: str) -> None:
        assert detail and remedy
        super().__init__(detail)
        self.detail = detail
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `examine` returns what it saw, or raises `CheckFailed`.

    It runs only when every check named in `needs` has passed.
    """

    name: str
    examine: Callable[[], str]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check; `remedy` is empty where nothing is to be done."""

    name: str
    ok: bool
    seconds: float
    detail: str
    remedy: str

    def __post_init__(self) -> None:
        assert self.ok != bool(self.remedy), "a failure says what to do, and nothing else does"


def examine(
    checks: Sequence[Check], before: Callable[[Check], None], after: Callable[[Finding], None]
) -> list[Finding]:
    """Run the checks in order; `before` and `after` are told of each."""
    findings: list[Finding] = []
    for check in checks:
        before(check)
        start = time.monotonic()
        passed = {finding.name for finding in findings if finding.ok}
        missing = [name for name in check.needs if name not in passed]
        if missing:
            ok, detail, remedy = False, "not run", f"mend '{missing[0]}' first"
        else:
            try:
                ok, detail, remedy = True, check.examine(), ""
            except CheckFailed as failure:
                ok, detail, remedy = False, failure.detail, failure.remedy
            except Exception as error:
                # A check that breaks is a finding like any other: the rest still have something to say.
                ok, detail = False, f"{type(error).__name__}: {error}"
                remedy = "this check itself failed: report it with the output of `longhaul doctor --json`"
        findings.append(Finding(check.name, ok, round(time.monotonic() - start, 2), detail, remedy))
        after(findings[-1])
    return findings
