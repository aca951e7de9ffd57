"""The shape of the device mesh as the user writes it: `8x4x2` or `dp=8,pp=4,tp=2`."""

from dataclasses import dataclass, replace

from jaxdist.config.errors import UsageError

AXES = ("dp", "pp", "tp")
HOW = "write --mesh DPxPPxTP, for example 8x4x2, or dp=8,pp=4,tp=2; one of them may be -1"
_MOST_DIGITS = 9


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Degrees of data, pipeline and tensor parallelism; one may be -1 until `resolve`."""

    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __post_init__(self):
        for axis in AXES:
            degree = getattr(self, axis)
            if (
                isinstance(degree, bool)
                or not isinstance(degree, int)
                or (degree < 1 and degree != -1)
            ):
                raise UsageError(
                    f"mesh axis {axis}={degree!r} must be a whole number from 1, or -1; {HOW}"
                )
        if self.degrees.count(-1) > 1:
            raise UsageError(f"mesh {self} has more than one -1; {HOW}")

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """`8x4x2` (all three, in the order dp, pp, tp) or `dp=8,tp=2` (axes left out are 1)."""
        if not isinstance(text, str):
            raise UsageError(f"mesh {text!r} is not a text; {HOW}")
        if "=" in text:
            degrees: dict[str, int] = {}
            for part in text.split(","):
                axis, _, degree = (piece.strip() for piece in part.partition("="))
                if axis not in AXES:
                    raise UsageError(
                        f"mesh {text!r}: {axis!r} is not an axis (dp, pp or tp); {HOW}"
                    )
                if axis in degrees:
                    raise UsageError(f"mesh {text!r} names {axis} twice; {HOW}")
                degrees[axis] = _degree(text, degree)
            return cls(**degrees)
        parts = text.lower().split("x")
        if len(parts) != len(AXES):
            raise UsageError(f"mesh {text!r} has {len(parts)} degrees instead of 3; {HOW}")
        return cls(**dict(zip(AXES, (_degree(text, part) for part in parts), strict=True)))

    @property
    def degrees(self) -> tuple[int, int, int]:
        """(dp, pp, tp)."""
        return (self.dp, self.pp, self.tp)

    @property
    def is_resolved(self) -> bool:
        """Whether no axis is -1."""
        return -1 not in self.degrees

    @property
    def size(self) -> int:
        """Number of devices of a resolved mesh."""
        if not self.is_resolved:
            raise UsageError(
                f"mesh {self} has no size before its -1 is resolved against a device count"
            )
        return self.dp * self.pp * self.tp

    def resolve(self, num_devices: int) -> "MeshShape":
        """The mesh with its -1 filled so that it takes all of `num_devices`.

        A mesh without -1 is returned as it is: whether its devices exist is asked elsewhere.
        """
        if self.is_resolved:
            return self
        fixed = -self.dp * self.pp * self.tp
        axis = AXES[self.degrees.index(-1)]
        if num_devices < fixed or num_devices % fixed:
            raise UsageError(
                f"mesh {self}: {num_devices} devices are not a multiple of {fixed}, so {axis}=-1 "
                f"cannot be filled; choose degrees whose product divides {num_devices}"
            )
        return replace(self, **{axis: num_devices // fixed})

    def __str__(self) -> str:
        return "x".join(map(str, self.degrees))


def _degree(text: str, word: str) -> int:
    word = word.strip()
    # int() would also take "1_0" and other alphabets' digits.
    if not (word.removeprefix("-").isascii() and word.removeprefix("-").isdigit()):
        raise UsageError(f"mesh {text!r}: {word!r} is not a whole number; {HOW}")
    if len(word) > _MOST_DIGITS:
        raise UsageError(f"mesh {text[:40]!r}: a degree has more than {_MOST_DIGITS} digits; {HOW}")
    return int(word)
