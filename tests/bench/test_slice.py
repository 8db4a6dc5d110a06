"""A slice has the released model's width, and a draft that fits it."""

import json
from pathlib import Path

import pytest

from bench.slice import SliceError, build
from model.capacity.geometry import Geometry
from model.kernel_sizes import complaint
from speculative.draft import DraftConfig


@pytest.mark.parametrize(("layers", "experts"), [(8, 64), (12, 16)])
def test_a_slice_is_as_wide_as_k3_and_as_deep_as_asked(tmp_path: Path, layers: int, experts: int) -> None:
    target, draft = build(tmp_path / "slice", layers=layers, experts=experts)
    found = Geometry.from_config(json.loads((target / "config.json").read_text()))
    released = Geometry()
    assert (found.layers, found.kda_layers, found.experts) == (layers, layers * 3 // 4, experts)
    for name in ("hidden", "vocabulary", "kda_heads", "mla_heads", "kv_lora_rank", "expert_hidden"):
        assert getattr(found, name) == getattr(released, name)
    assert complaint(target, draft) is None, "a GPU computes both"
    config = DraftConfig.read(draft)
    assert config.hidden_size == released.hidden and config.target_depth == layers
    assert len(set(config.target_layers)) == 5 and max(config.target_layers) < layers - 1


@pytest.mark.parametrize(("layers", "experts", "named"), [(6, 64, "--layers 6"), (8, 15, "--experts 15")])
def test_what_is_no_slice_is_refused(tmp_path: Path, layers: int, experts: int, named: str) -> None:
    with pytest.raises(SliceError, match=named):
        build(tmp_path / "slice", layers=layers, experts=experts)
    assert not list(tmp_path.iterdir())
