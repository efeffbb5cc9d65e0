"""The finding of a check, which is one line of a table, and the table of all findings for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

GOOD, NOTE, BAD = "good", "note", "bad"
"""Status of a finding: works; works less well, or is missing and not always needed; will not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check in one place."""

    check: str
    """What was checked: ``Java``, ``shared memory``."""

    where: str
    """Place of the check: ``this machine``, the name of a host, ``host-1 to host-2``, ``the cluster``."""

    status: str
    """One of :data:`GOOD`, :data:`NOTE` and :data:`BAD`."""

    found: str
    """What was found, with values."""

    advice: str = ""
    """What to do about it, or with it; empty if there is nothing to do."""


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Return whether no finding is :data:`BAD`."""
    return all(finding.status != BAD for finding in findings)


_SIGNS = {GOOD: "ok", NOTE: "note", BAD: "FAIL"}
_COLOURS = {GOOD: "32", NOTE: "33", BAD: "31"}
_NARROWEST = 30
_MOST_NAMED = 2


def as_table(findings: Sequence[Finding], *, width: int, has_colours: bool) -> str:
    """Return one or more lines for each finding, and a last line with a summary.

    Args:
        findings: findings in the order of the table, in which those of one check are put together.
        width: width of the terminal, in characters.
        has_colours: whether the terminal shows colours.
    """
    summary, findings = _summary(findings), _merge(findings)
    first = max(len(finding.check) for finding in findings)
    second = max(len(finding.where) for finding in findings)
    indent = 6 + first + 2 + second + 2
    lines = []
    order = list(dict.fromkeys(finding.check for finding in findings))
    for finding in sorted(findings, key=lambda finding: order.index(finding.check)):
        sign = f"{_SIGNS[finding.status]:<4}"
        if has_colours:
            sign = f"\033[{_COLOURS[finding.status]}m{sign}\033[0m"
        head = f"{sign}  {finding.check:<{first}}  {finding.where:<{second}}  "
        said = _wrap(finding.found, width - indent)
        if finding.advice:
            said += [
                f"-> {line}" if not number else f"   {line}"
                for number, line in enumerate(_wrap(finding.advice, width - indent - 3))
            ]
        lines += [head + said[0], *(" " * indent + line for line in said[1:])]
    return "\n".join([*lines, "", summary])


def _merge(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings that differ only in the place into one."""
    places: dict[Finding, list[str]] = {}
    for finding in findings:
        places.setdefault(replace(finding, where=""), []).append(finding.where)
    return [
        replace(
            finding,
            where=", ".join(where) if len(where) <= _MOST_NAMED else f"{where[0]} and {len(where) - 1} more",
        )
        for finding, where in places.items()
    ]


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, _NARROWEST), break_on_hyphens=False) or [""]


def _summary(findings: Sequence[Finding]) -> str:
    num_bad = sum(finding.status == BAD for finding in findings)
    num_notes = sum(finding.status == NOTE for finding in findings)
    notes = f", {num_notes} worth a look" if num_notes else ""
    if num_bad:
        return f"{num_bad} of {len(findings)} checks failed{notes}."
    return f"{len(findings)} checks, none failed{notes}."
