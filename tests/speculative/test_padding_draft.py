"""A padded draft proposes what it proposed before, from the padded target's states."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculative.draft import DraftConfig, random_weights, save
from speculative.network import DraftNetwork
from speculative.padding import PaddingError, pad

CONFIG = DraftConfig(
    hidden_size=384,
    vocab_size=300,
    target_depth=8,
    target_layers=(1, 4, 6),
    mask_token=299,
    max_positions=512,
    heads=12,  # their width together is the hidden size: rules go by names
    kv_heads=2,
    markov_rank=48,
)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    weights = random_weights(CONFIG)
    generator = torch.Generator().manual_seed(2)
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * torch.randn(tensor.shape, generator=generator)
    save(tmp_path / "draft", CONFIG, weights)
    return tmp_path / "draft"


def load(path: Path) -> DraftNetwork:
    network = DraftNetwork(DraftConfig.read(path))
    network.load_state_dict(load_file(path / "model.safetensors"))
    return network.requires_grad_(False)


def padded(x: Tensor, size: int, copies: int) -> Tensor:
    whole = torch.cat([x] * copies, -1)
    return torch.cat([whole, x.new_zeros(*x.shape[:-1], size - whole.shape[-1])], -1)


@pytest.mark.parametrize(("exact", "size", "copies"), [(False, 1024, 2), (True, 3072, 8)])
def test_proposes_the_same(draft: Path, tmp_path: Path, exact: bool, size: int, copies: int) -> None:
    summary = pad(draft, tmp_path / "padded", exact=exact)
    assert (summary["hidden_size"], summary["exact"]) == ([384, size], exact)
    old, new = load(draft), load(tmp_path / "padded")
    assert new.config.hidden_size == size

    generator = torch.Generator().manual_seed(3)
    embedded = torch.randn(2, 7, 384, generator=generator)
    features = torch.randn(2, 20, 3, 384, generator=generator)
    head = torch.randn(300, 384, generator=generator)
    previous = torch.randint(0, 300, (2, 7), generator=generator)
    positions = (20 + torch.arange(7)).expand(2, 7)
    mask = torch.ones(2, 1, 7, 27, dtype=torch.bool)

    def outputs(network: DraftNetwork, embedded: Tensor, features: Tensor, head: Tensor) -> list[Tensor]:
        hidden = network(embedded, positions, features.flatten(2), mask)
        codes = network.codes(previous)
        return [hidden @ head.T + network.bias(codes), network.confidence(hidden, codes)]

    before = outputs(old, embedded, features, head)
    # Of the target's states a draft reads the first copy alone: zeros behind it would do as well.
    for copies_of_states in (copies, 1):
        after = outputs(
            new,
            padded(embedded, size, copies),
            padded(features, size, copies_of_states),
            padded(head, size, 1),
        )
        for one, other in zip(before, after, strict=True):
            assert (one - other).abs().max() <= 1e-4 * one.abs().max()
        assert before[0].argmax(-1).equal(after[0].argmax(-1))


def test_leaves_alone_what_fits(draft: Path, tmp_path: Path) -> None:
    pad(draft, tmp_path / "padded")
    again = pad(tmp_path / "padded", tmp_path / "again")
    assert (again["padded"], again["path"]) == (False, str(tmp_path / "padded"))
    assert not (tmp_path / "again").exists()


def test_refuses_what_is_no_draft(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 384}))
    with pytest.raises(PaddingError, match="no DSpark draft"):
        pad(tmp_path, tmp_path / "padded")
