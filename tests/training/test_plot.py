import json

import numpy as np
from matplotlib.image import imread

from jaxdist.training.plot import plot_loss


def write(run_dir, rows):
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def has_colour(picture: np.ndarray, rgb: tuple[int, int, int]) -> bool:
    distance = np.abs(picture[..., :3] * 255 - np.asarray(rgb)[None, None]).max(-1)
    return int((distance < 3).sum()) > 20


def test_training_and_validation_curves_are_drawn(tmp_path):
    rows = [{"step": s, "loss": 5 / s, **({"val_loss": 6 / s} if s % 50 == 0 else {})}
            for s in range(1, 301)]  # fmt: skip
    write(tmp_path, [*rows, {"step": 301, "loss": None}])
    plot_loss(tmp_path)
    picture = imread(tmp_path / "loss.png")
    assert picture.shape[:2] == (600, 1080)
    assert has_colour(picture, (31, 119, 180)) and has_colour(picture, (255, 127, 14))


def test_a_run_without_validation(tmp_path):
    write(tmp_path, [{"step": 1, "loss": 2.0}])
    plot_loss(tmp_path)
    picture = imread(tmp_path / "loss.png")
    assert not has_colour(picture, (255, 127, 14))


def test_a_run_without_rows_has_no_picture(tmp_path):
    plot_loss(tmp_path)
    write(tmp_path, [])
    plot_loss(tmp_path)
    assert not (tmp_path / "loss.png").exists()
