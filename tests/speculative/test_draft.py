import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model import tiny
from speculative.draft import DraftConfig, DraftError, build, random_weights, write_successors


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(tiny.config()))
    return path


def test_config_fits_the_target(target: Path) -> None:
    text = tiny.config()["text_config"]
    config = DraftConfig.of(target)
    assert (config.hidden_size, config.vocab_size) == (text["hidden_size"], text["vocab_size"])
    assert all(layer < text["num_hidden_layers"] for layer in config.target_layers)


def test_markov_fields_stand_in_both_places(target: Path) -> None:
    written = DraftConfig.of(target).to_json()
    for name in ("markov_rank", "markov_head_type", "confidence_head_with_markov", "mask_token_id"):
        assert written[name] == written["dflash_config"][name]


def test_same_seed_same_weights(target: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        build(tmp_path / name, target, seed=3)
    build(tmp_path / "c", target, seed=4)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["fc.weight"], c["fc.weight"])


def test_successors_win_the_markov_head(target: Path) -> None:
    config = DraftConfig.of(target)
    weights = random_weights(config)
    successors = {token: (token * 7 + 3) % 500 for token in range(500)}
    write_successors(weights, config, successors)
    w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    proposed = (w1[:500] @ w2.T).argmax(-1).tolist()
    assert sum(proposed[token] == successor for token, successor in successors.items()) > 490


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftError, match="give a checkpoint"):
        DraftConfig.of(tmp_path)
