"""The trainable network against the reference model and its own definition."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import tiny
from model.reference import ReferenceModel
from model.training.geometry import Geometry, small_config
from model.training.network import Network, initialise
from model.training.weights import from_checkpoint, to_checkpoint

IDS = [(7 * n * n + 13 * n) % 2016 for n in range(192)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("network") / "k3").path


def test_logits_and_taps_are_the_references(path: Path) -> None:
    network = Network(Geometry.of(json.loads((path / "config.json").read_text())))
    from_checkpoint(network, load_file(path / "model.safetensors"))
    network.eval()
    reference = ReferenceModel.load(path)
    with torch.no_grad():
        hidden, taps = network(torch.tensor([IDS, IDS[::-1]]), taps=(1, 4, 7))
        logits = network.lm_head(hidden).view(2, len(IDS), -1)
    for row, ids in enumerate((IDS, IDS[::-1])):
        assert logits[row].allclose(reference.logits(ids), atol=1e-3)
        expected = reference.hidden_taps(ids, (1, 4, 7))
        found = torch.stack([tap.view(2, len(IDS), -1)[row] for tap in taps], 1)
        assert found.allclose(expected, atol=1e-3)


def test_the_small_models_checkpoint_gives_the_references_logits(tmp_path: Path) -> None:
    config = small_config()
    network = Network(Geometry.of(config))
    initialise(network, 0)
    tensors = to_checkpoint(network)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.no_grad():
        logits = network.lm_head(network(torch.tensor([IDS[:64]]))[0])
    assert logits.allclose(ReferenceModel.load(tmp_path).logits(IDS[:64]), atol=1e-3)
    assert 10e6 < sum(tensor.numel() for tensor in tensors.values()) < 20e6
