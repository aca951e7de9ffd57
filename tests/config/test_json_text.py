import pytest

from jaxdist.config import UsageError
from jaxdist.config.json_text import read_object


def test_an_object_is_read() -> None:
    assert read_object(b'{"a": [1, null]}', "here") == read_object('{"a": [1, null]}', "here")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[1]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("", "not JSON"),
        ('{"a": 1', "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        ('{"a": ' * 100_000, "not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_all_else_is_one_line_with_its_place(text: str | bytes, word: str) -> None:
    with pytest.raises(UsageError, match=f"^here is {word}") as refused:
        read_object(text, "here")
    assert "\n" not in str(refused.value)
