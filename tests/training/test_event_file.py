"""Errors of the disk are raised where they are met, and nothing waits for ever."""

import io

import pytest

from jaxdist.training.event_file import EventFile


class Full(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_by_the_next_flush_and_not_again(tmp_path):
    file = EventFile(tmp_path, 0)
    file.write(1, {"loss": 1.0})
    file.flush()
    file._writer._py_recordio_writer._writer.close()
    file._writer._py_recordio_writer._writer = io.BufferedWriter(Full())
    for step in range(2, 20):  # more than any queue would take
        file.write(step, {"loss": 1.0})
    with pytest.raises(OSError, match="No space left"):
        file.flush()
    file.close()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        EventFile(tmp_path / "file" / "tensorboard", 0)
