"""What is given before a stop text, however text and stop are cut."""

from hypothesis import example, given
from hypothesis import strategies as st

from jaxdist.inference.stop_strings import StopStrings

TEXT = st.text("ab", max_size=14)


def run(pieces, stops, include=False):
    scanner, given_text = StopStrings(stops, include=include), ""
    for piece in pieces:
        text, stop = scanner.push(piece)
        given_text += text
        if stop is not None:
            return given_text, stop
    return given_text + scanner.finish(), None


def plain(text, stops, include):
    """The first end of a stop text, tried character by character."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(TEXT, st.lists(st.text("ab", max_size=4), max_size=4), st.booleans(), st.data())
@example("aab", ["ab"], False, None)
def test_every_cut_gives_the_same(text, stops, include, data):
    cuts = [1] if data is None else data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    ends = sorted({*cuts, len(text)})
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert run(pieces, stops, include) == plain(text, stops, include)


@given(TEXT, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_given_is_never_taken_back(text, stops):
    scanner, so_far = StopStrings(stops), ""
    whole, _ = plain(text, stops, False)
    for character in text:
        piece, stop = scanner.push(character)
        so_far += piece
        assert whole.startswith(so_far)
        if stop is not None:
            return


def test_nothing_ends_while_it_may_not():
    scanner = StopStrings(["ab", "xaby"])
    assert scanner.push("ab", active=False) == ("ab", None)
    assert scanner.push("xab", active=False) == ("", None)
    assert scanner.push("y") == ("", "xaby")
    scanner = StopStrings(["ab"])
    assert scanner.push("a", active=False) == ("", None)
    assert scanner.push("b") == ("", "ab")
