"""A draft trained on a CPU, in miniature: blocks as in serving, it learns, goes on, and loads elsewhere."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model import small
from model.training import checkpoint
from model.training.geometry import Geometry, small_config
from model.training.network import Network, initialise
from service.cli import main
from speculative.acceptance import Proposals, Proposer, Tally, everywhere, measure, walk
from speculative.draft import DraftConfig, random_weights
from speculative.network import DraftNetwork
from speculative.objective import Anchors, draw_anchors, objective, run_blocks
from speculative.training import Plan, Run

pytestmark = pytest.mark.slow

TARGET_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_token": 2,
    "intermediate_size": 128, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "q_lora_rank": 32,
    "kv_lora_rank": 32, "num_attention_heads": 2,
}  # fmt: skip
DRAFT_SIZES = {
    "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 64, "markov_rank": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    config = small_config(**TARGET_SIZES)
    network = Network(Geometry.of(config))
    initialise(network, 0)
    vocabulary = (small.SHIPPED / "tokenizer.json").read_text()
    checkpoint.write(path, config, checkpoint.rounded(network), vocabulary)
    return path


def plan(target: Path, output: Path, steps: int) -> Plan:
    return Plan(
        target, output, steps=steps, tokens=1536, shares={512: 0.5, 768: 0.5}, rolled=192, round_tokens=3072,
        rollout_minutes=0.01, anchors=128, rate=4e-3, workers=1, device="cpu", dtype=torch.float32,
        sizes=DRAFT_SIZES, held_out=((768, 2),),
    )  # fmt: skip


def quiet(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft")
    Run(plan(target, path, 25), quiet).train(quiet)
    return path


def log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]


def test_it_learns_and_says_how_long_its_proposals_are(trained: Path) -> None:
    rolled, first, last, result = log(trained)
    assert rolled["rolled_out_tokens"] > 0
    assert last["step"] == 20 and last["loss"] < first["loss"] - 0.05
    assert result["held_out"]["768"]["accept_length"] >= 1 and result["held_out"]["768"]["rounds"] > 0


def test_it_is_written_in_the_format_that_sglang_loads(trained: Path, target: Path) -> None:
    config = DraftConfig.of(target, **DRAFT_SIZES)
    found = load_file(trained / "model.safetensors")
    wanted = random_weights(config)
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in wanted.items()
    }
    assert json.loads((trained / "config.json").read_text()) == config.to_json()


def test_a_run_goes_on(trained: Path, target: Path, tmp_path: Path) -> None:
    """From its state and the rollouts that it had."""
    shutil.copytree(trained, tmp_path / "run")
    run = Run(plan(target, tmp_path / "run", 26), quiet)
    assert run.step == 25
    assert run.train(quiet)["step"] == 26
    assert sum("step" not in line for line in log(tmp_path / "run")) == 1, "rolled out once"


@pytest.fixture
def pair(target: Path) -> tuple[Network, DraftNetwork]:
    network = Network(Geometry.of(json.loads((target / "config.json").read_text())))
    initialise(network, 0)
    draft = DraftNetwork(DraftConfig.of(target, **DRAFT_SIZES))
    draft.load_state_dict(random_weights(draft.config, 5))
    return network.requires_grad_(False), draft.requires_grad_(False)


def test_blocks_in_training_are_those_of_serving(pair: tuple[Network, DraftNetwork]) -> None:
    """A block among others, with its anchor deep in the text, is a block alone behind its context."""
    network, draft = pair
    ids = torch.randint(0, 4000, (2, 128), generator=torch.Generator().manual_seed(1))
    last, taps = network(ids, draft.config.target_layers)
    features = torch.cat(taps, -1).unflatten(0, ids.shape)
    written = torch.ones_like(ids, dtype=torch.bool)
    anchors = Anchors(torch.tensor([[5, 60, 90], [1, 7, 100]]), torch.ones(2, 3, dtype=torch.bool))
    blocks = run_blocks(draft, network, ids, written, features, anchors)
    block = draft.config.block_size
    for row, column in ((0, 1), (1, 0), (1, 2)):
        at = int(anchors.at[row, column])
        tokens = torch.full((1, block), draft.config.mask_token)
        tokens[0, 0] = ids[row, at]
        alone = draft(
            network.model.embed_tokens(tokens),
            torch.arange(at, at + block)[None],
            features[row, :at][None],
            torch.ones(1, 1, block, at + block, dtype=torch.bool),
        )
        assert alone[0].allclose(blocks.hidden[row, column], atol=1e-5)
    assert blocks.labels[0, 0].equal(ids[0, 6 : 6 + block])
    loss, figures = objective(blocks, anchors, network, last.unflatten(0, ids.shape), 1.0)
    assert loss > 0 and 1 <= figures["teacher_forced_length"] <= 1 + block


def test_a_perfect_draft_has_no_distance(pair: tuple[Network, DraftNetwork]) -> None:
    network, draft = pair
    ids = torch.randint(0, 4000, (1, 64), generator=torch.Generator().manual_seed(1))
    last, taps = network(ids, draft.config.target_layers)
    anchors = Anchors(torch.tensor([[5, 30]]), torch.ones(1, 2, dtype=torch.bool))
    blocks = run_blocks(draft, network, ids, ids >= 0, torch.cat(taps, -1)[None], anchors)
    block = draft.config.block_size
    for column, at in enumerate((5, 30)):
        blocks.logits[0, column] = network.lm_head(last[at : at + block]).float()
    _, figures = objective(blocks, anchors, network, last[None], 1.0)
    assert figures["distance"] < 1e-5
    assert figures["teacher_forced_length"] == pytest.approx(1 + block, abs=1e-3)


def test_anchors_stand_before_what_the_assistant_wrote() -> None:
    written = torch.zeros(2, 64, dtype=torch.bool)
    written[0, 20:30] = True
    anchors = draw_anchors(written, 12, torch.Generator().manual_seed(0))
    assert sorted(anchors.at[0][anchors.is_used[0]].tolist()) == list(range(19, 29))
    assert not anchors.is_used[1].any()


def test_a_walk_accepts_what_the_text_says() -> None:
    ids = np.arange(100, 120)
    written = (ids >= 105) & (ids < 115)
    right = {at: [int(x) for x in ids[at + 1 : at + 4]] for at in range(5, 15)}
    wrong = {at: [0, *values[1:]] for at, values in right.items()}

    def walked(proposals: dict[int, list[int]]) -> Tally:
        tally = Tally()

        def propose(anchors: list[int]) -> Proposals:
            tokens = torch.tensor([proposals[at] for at in anchors])
            return Proposals(tokens, torch.zeros(tokens.shape))

        for found in walk(ids, written, propose):
            tally.add(found, ("thinking",))
        return tally

    # 5 -> 9 -> 13, where only the last token is left to propose.
    tally = walked(right)
    assert (tally.rounds, tally.gained, tally.survived) == (3, 9, [3, 2, 2])
    assert tally.to_json()["by_segment"] == {"thinking": {"accept_length": 3.0, "rounds": 3}}
    tally = walked(wrong)
    assert (tally.rounds, tally.gained, tally.length) == (9, 9, 1)


def test_proposals_follow_the_markov_head(pair: tuple[Network, DraftNetwork]) -> None:
    """Each token is the likeliest after the one proposed before it."""
    network, draft = pair
    ids = torch.randint(0, 4000, (64,), generator=torch.Generator().manual_seed(2))
    _, taps = network(ids[None], draft.config.target_layers)
    features = torch.cat(taps, -1)
    proposed, sure = Proposer(draft, network, ids, features)(torch.tensor([9, 40]))
    for row, at in enumerate((9, 40)):
        text = torch.cat((ids[: at + 1], proposed[row], ids[at + 8 :]))[None]
        anchors = Anchors(torch.tensor([[at]]), torch.ones(1, 1, dtype=torch.bool))
        blocks = run_blocks(draft, network, text, text >= 0, features[None], anchors)
        assert blocks.logits[0, 0].argmax(-1).equal(proposed[row])
        assert blocks.confidence[0, 0].allclose(sure[row], atol=1e-4)


def test_a_text_is_measured_whole(pair: tuple[Network, DraftNetwork]) -> None:
    network, draft = pair
    written = np.arange(70) >= 10
    measured = measure(draft, network, np.arange(70), written)
    assert sum(found.gained for found in measured.rounds) == 59
    assert measured.rounds[0].at == 10 and len(measured.is_greedy) == 60
    every = measure(draft, network, np.arange(70), written, everywhere).rounds
    assert [found.at for found in every] == list(range(10, 69))
    accepted = {found.at: found.accepted for found in every}
    assert all(accepted[found.at] == found.accepted for found in measured.rounds)


def test_the_command_trains(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["draft", "train", "--output", str(tmp_path / "draft"), "--target", str(target), "--json"]
    assert main([*options, "--longest", "100"]) == 2
    assert "--longest 100" in capsys.readouterr().err
    assert main([*options, "--minutes", "0"]) == 2
    assert "--minutes" in capsys.readouterr().err
    assert main([*options, "--steps", "0"]) == 2
    assert "--steps" in capsys.readouterr().err
    assert (
        main(["draft", "train", "--output", str(tmp_path), "--target", str(tmp_path), "--device", "cpu"]) == 1
    )
    assert "give a checkpoint" in capsys.readouterr().err
