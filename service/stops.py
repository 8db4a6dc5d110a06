"""Stop strings, matched in the visible text.

SGLang matches stop strings in everything that is sampled, so that a stop word in the reasoning, or in a
tool's arguments, would end the turn. Here they are matched in the text channel alone, token by token; the
engine's work is then aborted.
"""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of some strings in a text that arrives in pieces, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def feed(self, text: str) -> str:
        """Take the next piece; returns the text that no stop string can contain any more.

        Once `matched` is set, what it returned so far is the whole text before the match.
        """
        assert self.matched is None, "the text ended at a stop string"
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            # Of two that begin at one place the longer would take no less of the text: either will do.
            place, self.matched = min(found)
            self._held = ""
            return text[:place]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, but is not `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
