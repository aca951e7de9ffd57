import math
from typing import Any

import pytest

from jaxdist.config import UsageError, limits


@pytest.mark.parametrize("value", [0, -3, 1.0, "3", None, True, math.nan, 2**31])
def test_whole_refuses(value: Any) -> None:
    with pytest.raises(UsageError, match="train.steps="):
        limits.whole("train.steps", value, 1)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "1", None, True, -0.1, 1.1, 10**400]
)
def test_number_refuses(value: Any) -> None:
    with pytest.raises(UsageError, match="x="):
        limits.number("x", value, 0, 1)


def test_number_borders() -> None:
    limits.number("x", 0, 0, 1)
    limits.number("x", 1, 0, 1)
    with pytest.raises(UsageError, match="greater than 0 and less than 1"):
        limits.number("x", 0, above=0, below=1)
    with pytest.raises(UsageError):
        limits.number("x", 1.0, above=0, below=1)


@pytest.mark.parametrize(("value", "on_device"), [(1e-50, "0"), (1e-39, "0"), (1 - 1e-12, "1")])
def test_number_keeps_off_its_bounds_on_the_device_too(value: float, on_device: str) -> None:
    with pytest.raises(UsageError, match=f"as a float of 32 bits it is {on_device}$"):
        limits.number("x", value, above=0, below=1)
    limits.number("x", value, 0, 1)


@pytest.mark.parametrize("value", [1e39, -1e39, 10**400])
def test_number_fits_32_bits(value: Any) -> None:
    with pytest.raises(UsageError, match="must be a finite number"):
        limits.number("x", value)


def test_choice_names_the_nearest() -> None:
    limits.choice("x", "bf16", ("fp32", "bf16"))
    with pytest.raises(UsageError, match="not one of fp32, bf16; did you mean bf16?"):
        limits.choice("x", "bf17", ("fp32", "bf16"))


def test_choice_does_not_take_true_for_one() -> None:
    with pytest.raises(UsageError):
        limits.choice("parallel.zero", True, (0, 1))


@pytest.mark.parametrize("value", ["", 3, None])
def test_text_refuses(value: Any) -> None:
    with pytest.raises(UsageError):
        limits.text("x", value)


@pytest.mark.parametrize("value", ["", 3, None, "a\udcff", "a\0b"])
def test_path_refuses(value: Any) -> None:
    limits.path("x", "~/a b/é.txt")
    with pytest.raises(UsageError, match="x="):
        limits.path("x", value)


@pytest.mark.parametrize("value", ["true", 0, 1, None])
def test_flag_refuses(value: Any) -> None:
    with pytest.raises(UsageError):
        limits.flag("x", value)
