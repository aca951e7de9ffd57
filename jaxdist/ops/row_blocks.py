"""To how many rows each expert's are padded; without JAX, for the planner counts them too."""

_ON_CPU = 64
_LEAST, _MOST = 16, 2048  # on a GPU
_PADDING = 4  # of a GPU's rows one for so many may be padding, where there are enough


def rows_of_block(num_rows: int, num_experts: int, platform: str) -> int:
    """Rows that are multiplied with one expert's weight at once; 1 where groups have any size.

    On GPUs the largest power of two of which a block for each expert is at most a quarter of all
    rows: a small one reads the weight too often, a large one multiplies padding.
    num_rows: Of all experts, without padding. platform: JAX's name.
    """
    if platform != "gpu":
        return _ON_CPU if platform == "cpu" else 1
    fair = max(num_rows // (_PADDING * num_experts), 1)
    return min(max(1 << (fair.bit_length() - 1), _LEAST), _MOST)
