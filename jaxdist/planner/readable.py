"""Byte counts for people."""


def readable(size: float) -> str:
    """`size` bytes in the unit that suits it, as in 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
