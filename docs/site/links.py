"""Asks for the addresses of other sites that the documentation names: ``make links``.

Ends with 1 if one of them is wrong: its server knows no such page. Addresses that cannot be reached from here, or whose
server refuses programs, are listed, and have to be opened in a browser.
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 20.0

_ADDRESS = re.compile(r"https?://[\w.-]+\.\w[^\s<>\"'`\\)\]|]*")
# Examples, and names that stand for the reader's.
_NO_SITE = re.compile(
    r"//(?:localhost|127\.|0\.0\.0\.0|\[|[^/]*(?:example|HOST|[{$@]|\.svc)|[^./:]+(?:[:/]|$))"
)
_GONE = (404, 410)


def addresses() -> dict[str, list[str]]:
    """Return the files that name each address, by address."""
    pages = [*ROOT.glob("*.md"), ROOT / "pyproject.toml", *(ROOT / "docs").rglob("*.md")]
    pages += [*(ROOT / "docs" / "site").glob("*.yml"), *(ROOT / "notebooks").glob("*.ipynb")]
    named: dict[str, list[str]] = {}
    for page in sorted(pages):
        for match in _ADDRESS.findall(page.read_text()):
            address = match.partition("#")[0].rstrip(".,;:*")
            if not _NO_SITE.search(address):
                named.setdefault(address, []).append(str(page.relative_to(ROOT)))
    return named


def state_of(address: str) -> str:
    """Return ``good``, or why an address is wrong, which begins with ``wrong``, or could not be checked."""
    request = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0 (a check of links)"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return "good"
    except urllib.error.HTTPError as error:
        return f"{'wrong' if error.code in _GONE else 'not checked'}: HTTP {error.code}"
    except (
        OSError,
        ValueError,
    ) as error:  # no such host or no network, a cut connection, an answer that is not HTTP
        return f"not checked: {type(error).__name__}: {error}"


def main() -> int:
    """Print the addresses that are wrong and those that could not be checked."""
    named = addresses()
    with ThreadPoolExecutor(16) as pool:
        states = dict(zip(named, pool.map(state_of, named), strict=True))
    for address, state in sorted(states.items(), key=lambda item: item[1]):
        if state != "good":
            print(f"{state}\n    {address}\n    in {', '.join(dict.fromkeys(named[address]))}")
    words = [state.partition(":")[0] for state in states.values()]
    print(", ".join(f"{words.count(word)} {word}" for word in ("good", "wrong", "not checked")))
    return int("wrong" in words)


if __name__ == "__main__":
    sys.exit(main())
