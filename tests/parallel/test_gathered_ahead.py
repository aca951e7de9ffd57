"""ZeRO-3 gathers each layer while the one before it is at work, whatever the schedule."""

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, options",
    [
        ("2x2x1", dict(model=dict(num_hidden_layers=5), skip_bubbles=False)),
        ("2x2x2", dict(schedule="interleaved", num_chunks=2)),
        ("2x4x1", dict(schedule="zb")),
        ("2x2x1", dict(model=dict(num_hidden_layers=5))),
        ("4x2x1", dict(schedule="gpipe", skip_bubbles=False)),
        (
            "2x2x1",
            dict(schedule="interleaved", num_chunks=2, model=dict(num_hidden_layers=7)),
        ),
    ],
)
def test_gradients_are_those_of_one_device(make_case, mesh, options):
    make_case(mesh, zero=3, num_microbatches=4, **options).assert_agrees()
