"""Names on the hub, without a network."""

import sys
from pathlib import Path

import pytest

from jaxdist.config import UsageError
from jaxdist.interop import hub

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.mark.parametrize(
    ("name", "is_name"),
    [
        ("HuggingFaceTB/SmolLM2-135M", True),
        ("../models", False),
        ("/owner/model", False),
        ("a/b/c", False),
        ("runs", False),
    ],
)
def test_what_reads_like_a_name(name, is_name):
    assert hub.is_hub_name(name) is is_name


def test_only_what_is_needed_is_fetched(monkeypatch):
    def fetch(name, allow_patterns):
        assert "*.safetensors" in allow_patterns and not any("bin" in p for p in allow_patterns)
        return f"/cache/{name}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert hub.download("owner/model") == Path("/cache/owner/model")


def test_no_network_is_one_line(monkeypatch):
    def fetch(name, allow_patterns):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(UsageError, match="owner/model .* no route to host; give a Hugging Face"):
        hub.download("owner/model")


def test_no_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'jaxdist\[hub\]'"):
        hub.download("owner/model")


def test_a_path_into_a_folder_that_is_here_is_no_name(monkeypatch, tmp_path):
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"there is no runs/quikstart: .* did you mean quickstart"):
        hub.download("runs/quikstart")
    with pytest.raises(UsageError, match="it holds quickstart"):
        hub.download("runs/nope")
