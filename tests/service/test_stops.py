from hypothesis import given
from hypothesis import strategies as st

from service.stops import StopMatcher

# Few letters, so that stops overlap with the text, themselves and each other.
TEXT = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def test_a_stop_across_pieces_is_found_and_never_shown():
    matcher = StopMatcher(["Observation:"])
    shown = [matcher.feed(piece) for piece in ("Think. Obs", "erv", "ation: 3")]
    assert shown == ["Think. ", "", ""]
    assert matcher.matched == "Observation:"


def test_what_only_looked_like_a_stop_is_shown_at_the_end():
    matcher = StopMatcher(["###"])
    assert matcher.feed("a##") == "a"
    assert matcher.flush() == "##"
    assert matcher.matched is None


@given(TEXT, STOPS, st.data())
def test_pieces_show_what_the_whole_text_shows(text: str, stops: list[str], data: st.DataObject):
    pieces: list[str] = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            break
    shown += matcher.flush()
    assert not any(stop in shown for stop in stops)
    if any(stop in text for stop in stops):
        assert matcher.matched is not None
        assert text.startswith(shown + matcher.matched)
    else:
        assert shown == text
