"""Training end to end on a CPU, in miniature: it learns, goes on, and ships what it learnt."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from model import small
from model.reference import ReferenceModel
from model.tasks.lexicon import Split
from model.tokenizer import K3Tokenizer
from model.training import documents, schedule
from model.training.curve import read_log
from model.training.measure import losses
from model.training.optimizer import orthogonalise
from model.training.pack import pack
from model.training.run import Plan, Run
from model.training.weights import read

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_token": 2,
    "intermediate_size": 128, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "q_lora_rank": 32,
    "kv_lora_rank": 32, "num_attention_heads": 2,
}  # fmt: skip


def plan(output: Path, steps: int, **changes: object) -> Plan:
    given = {
        "output": output, "steps": steps, "tokens": 512, "longest": 256, "workers": 1, "device": "cpu",
        "dtype": torch.float32, "is_compiled": False, "sizes": SIZES, **changes,
    }  # fmt: skip
    return Plan(**given)  # pyright: ignore[reportArgumentType]


def quiet(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def vocabulary() -> str:
    return (small.SHIPPED / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, vocabulary: str) -> Path:
    path = tmp_path_factory.mktemp("run")
    Run(plan(path, 14), vocabulary, quiet).train(quiet)
    return path


@pytest.mark.slow
def test_it_learns(trained: Path) -> None:
    values = [line["loss"] for line in read_log(trained / "log.jsonl") if "kinds" in line]
    assert len(values) == 14
    assert values[-1] < values[0] - 0.4


def test_a_finished_run_goes_on(trained: Path, vocabulary: str, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    run = Run(plan(tmp_path / "run", 16), vocabulary, quiet)
    assert run.step == 14
    assert run.train(quiet)["step"] == 16


def test_it_is_shipped_as_a_checkpoint(trained: Path, vocabulary: str, tmp_path: Path) -> None:
    """The shipped tensors, rounded as they are, give the trainer's logits in the reference model."""
    source = tmp_path / "source"
    source.mkdir()
    for file in (*trained.glob("*.safetensors"), trained / "log.jsonl"):
        shutil.copyfile(file, source / file.name)
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "tokenizer.json").write_text(vocabulary)
    pack(source, tmp_path / "shipped", sizes=SIZES)
    card = (tmp_path / "shipped" / "README.md").read_text()
    assert "| steps | 14 |" in card and "| tokens | 7,168 |" in card
    assert "<svg" in (tmp_path / "shipped" / "loss.svg").read_text()
    path = small.build(tmp_path / "checkpoint", tmp_path / "shipped")
    assert json.loads((path / "config.json").read_text())["text_config"]["hidden_size"] == 64
    run = Run(plan(tmp_path / "again", 1, weights=path), vocabulary, quiet)
    ids = documents.batch(0, 0, 128, 128, documents.Encoder(K3Tokenizer.load(path)), Split.HELD_OUT)[0][0]
    logits = ReferenceModel.load(path).logits(ids[:-1].tolist())
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[1:]).long(), reduction="none")
    with torch.no_grad():
        found = losses(
            run.network, torch.from_numpy(ids[None, :-1]).long(), torch.from_numpy(ids[None, 1:]).long()
        )
    assert found.allclose(expected, atol=1e-3)
    assert read(path).keys() == read(trained).keys()


def test_orthogonal_updates() -> None:
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.5 and values.max() < 1.3


def test_the_schedule_rises_stays_and_falls() -> None:
    scales = [schedule.scale(n / 100) for n in range(101)]
    assert scales[0] < scales[1] == max(scales) == scales[40]
    assert scales[45:] == sorted(scales[45:], reverse=True) and scales[-1] == pytest.approx(0.02)
    assert {schedule.length(0, n, 0.05, 32768) for n in range(50)} == {1024}
    assert {schedule.length(0, n, 0.95, 32768) for n in range(99)} == {2048, 4096, 8192, 16384, 32768}
    assert max(schedule.length(0, n, 0.95, 4096) for n in range(99)) == 4096
