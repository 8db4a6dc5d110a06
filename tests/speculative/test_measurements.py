"""The figures of drafts: calibration, distributions, sizes, and decoding with a draft against without."""

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from model import small
from model.training.geometry import Geometry, small_config
from model.training.network import Network, initialise
from service.cli import main
from speculative import calibration, plots, sizing
from speculative.calibration import Outcomes
from speculative.decoding import Decoder
from speculative.distribution import chi_square
from speculative.draft import DraftConfig, DraftError, random_weights
from speculative.network import DraftNetwork
from speculative.speculation import Speculator

pytestmark = pytest.mark.slow

TARGET_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_token": 2,
    "intermediate_size": 128, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "q_lora_rank": 32,
    "kv_lora_rank": 32, "num_attention_heads": 2,
}  # fmt: skip


def outcomes(too_sure: float) -> Outcomes:
    """Blocks of three positions whose true logits were multiplied."""
    source = np.random.default_rng(0)
    logits = source.normal(1.0, 1.5, (20_000, 3))
    happened = source.random(logits.shape) < 1 / (1 + np.exp(-logits))
    accepted = happened.cumprod(1).sum(1)
    return Outcomes(logits * too_sure, accepted, np.full(len(logits), 3))


@pytest.mark.parametrize("too_sure", [0.5, 1.0, 2.0])
def test_temperatures_undo_what_a_head_is_too_sure_of(too_sure: float) -> None:
    found = outcomes(too_sure)
    temperatures = calibration.fit(found)
    assert temperatures == pytest.approx([too_sure] * 3, rel=0.15)
    last = [calibration.error(*found.at(2, found.logits / scale)) for scale in (1.0, temperatures)]
    assert last[1] <= last[0] and last[1] < 0.02


def test_positions_behind_a_message_do_not_count() -> None:
    found = Outcomes(np.zeros((2, 2)), np.array([1, 0]), np.array([1, 2]))
    chance, happened = found.at(1, found.logits)
    assert chance.tolist() == [0.25] and happened.tolist() == [False]
    with pytest.raises(AssertionError):
        Outcomes(np.zeros((1, 2)), np.array([2]), np.array([1]))


def test_chi_square_tells_a_wrong_distribution() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.03, 0.02])
    right = Counter({0: 210, 1: 110, 2: 62, 3: 10, 4: 8})
    statistic, degrees = chi_square(right, chances)
    assert degrees == 4 and statistic < 9.49  # its 95 % quantile
    wrong, _ = chi_square(Counter({0: 300, 1: 60, 2: 30, 3: 10}), chances)
    assert wrong > 18.5  # its 99.9 % quantile
    few, degrees = chi_square(Counter({0: 50, 1: 30, 2: 15, 4: 5}), chances)
    assert degrees == 3 and few == pytest.approx(0.0)


@pytest.fixture(scope="module")
def pair() -> tuple[Network, DraftNetwork]:
    network = Network(Geometry.of(small_config(**TARGET_SIZES)))
    initialise(network, 0)
    config = DraftConfig(
        hidden_size=64, vocab_size=4096, target_depth=4, target_layers=(1, 2), mask_token=4095,
        max_positions=4096, head_dim=16, intermediate_size=64, markov_rank=32,
    )  # fmt: skip
    draft = DraftNetwork(config)
    draft.load_state_dict(random_weights(config, 5))
    return network.requires_grad_(False), draft.requires_grad_(False)


@pytest.mark.parametrize("knows", [0, 1])
def test_decoding_with_a_draft_writes_what_decoding_without_does(
    pair: tuple[Network, DraftNetwork], knows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With proposals that are wrong, and with some that are right for a while."""
    network, draft = pair
    source = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 4000, (length,), generator=source).tolist() for length in (65, 90, 131)]
    plain = Decoder(network, 3, 192, 0.0, ())
    plain.begin(prompts, 64)
    for _ in range(127):
        plain.step()
    speculator = Speculator(network, draft, 3, 192)
    if knows:

        def propose(anchor: torch.Tensor, positions: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            right = plain.text.gather(1, positions + 1)
            right[:, 3:] += torch.arange(3).unsqueeze(1) % 2  # the second goes wrong at its fourth
            return right % 4096

        monkeypatch.setattr(speculator, "_propose", propose)
    speculator.begin(prompts)
    kept = torch.zeros(3, dtype=torch.long)
    while int(speculator.decoder.known.max()) < 184:
        speculator.round()
        kept = torch.maximum(kept, speculator.accepted)
    assert kept.tolist() == ([7, 3, 7] if knows else [0, 0, 0])
    for row, known in enumerate(speculator.decoder.known.tolist()):
        end = min(known, int(plain.known[row]))
        assert speculator.decoder.text[row, :end].equal(plain.text[row, :end])


def test_plots_are_whole() -> None:
    curves = {"1,024": [(1.0, 0.9), (2.0, 0.5)], "8,192": [(1.0, 0.8), (2.0, 0.4)]}
    root = ElementTree.fromstring(plots.lines("A & B", ("k", "tokens"), curves))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A & B", "1", "2", "0.4", "1,024", "8,192"} <= set(texts)
    log = [{"step": n, "length": 1024, "seconds": 60.0 * n, "teacher_forced_length": 1.0 + n} for n in (1, 2)]
    assert "1,024" in plots.training([{"rolled_out_tokens": 5}, *log], 7)


def test_sizes_of_a_target_are_those_of_its_checkpoint() -> None:
    load = sizing.Workload(steps=10, tokens=65536, anchors=64)
    found = sizing.plan(small.SHIPPED, sizing.Sizes(taps=3), load)
    config = json.loads((small.SHIPPED / "config.json").read_text())
    network = Network(Geometry.of(config))
    matrices = sum(weight.numel() for weight in network.parameters() if weight.ndim > 1)
    assert found["target_parameters"] == pytest.approx(matrices, rel=0.005)
    draft = DraftConfig.of(
        small.SHIPPED, layers=5, heads=64, kv_heads=16, head_dim=64, intermediate_size=14336
    )
    own = sum(tensor.numel() for tensor in random_weights(draft).values() if tensor.ndim > 1)
    assert found["draft_parameters"]["own"] == pytest.approx(own, abs=2)
    assert found["seconds_a_step"] * 10 / 3600 == pytest.approx(found["hours"], abs=0.01)


def test_a_dry_run_runs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["draft", "train", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["draft_parameters"]["own"] == 7_258_753 and found["batch"]["blocks"] == 4096
    assert main(["draft", "train", "--dry-run", "--size", "width=3"]) == 2
    assert "--size width=3" in capsys.readouterr().err
    assert main(["draft", "train", "--dry-run", "--target", str(tmp_path)]) == 1
    assert "give a checkpoint" in capsys.readouterr().err
    assert main(["draft", "train"]) == 2
    assert "--output" in capsys.readouterr().err
    with pytest.raises(DraftError, match="no DSpark draft"):
        DraftConfig.read(tmp_path)
