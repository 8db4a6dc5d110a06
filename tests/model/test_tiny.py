import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model import tiny
from model.encoding import conversation_segments
from model.reference import ReferenceModel
from model.tiny_weights import ROUTING_DIMS, Weight, weights
from model.tokenizer import K3Tokenizer
from model.vocabulary import TEXT_TOKENS, VOCAB_SIZE
from service.cli import main

DIGESTS = {
    "model.safetensors": "15062fb4d5bcd5dc6db4e118c88a2b06555c762867656a61f5f72a3849596fd7",
    "tokenizer.json": "d50367e834539d87fd057e7c57d818ee9f43cb538a61e2c6813556a6dca41604",
    "config.json": "b4d51f0f58f062f31181f9c51cceb842cb7c7a0d1cc8f60aa0689318eade3a43",
}
WRITES_STREAM = re.compile(r"\.(o_proj|(mlp|shared_experts)\.down_proj|routed_expert_up_proj)\.weight$")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tiny.Checkpoint:
    return tiny.build(tmp_path_factory.mktemp("tiny") / "k3")


@pytest.fixture(scope="module")
def model(checkpoint: tiny.Checkpoint) -> ReferenceModel:
    return ReferenceModel.load(checkpoint.path)


@pytest.fixture(scope="module")
def prompt(checkpoint: tiny.Checkpoint) -> list[int]:
    text = (Path(tiny.__file__).parent / "tokenization" / "corpus.txt").read_text()[:1500]
    return K3Tokenizer.load(checkpoint.path).encode_segments(
        conversation_segments([{"role": "user", "content": text}])
    )


def test_is_the_same_on_every_machine(checkpoint: tiny.Checkpoint) -> None:
    assert {name: checkpoint.files[name] for name in DIGESTS} == DIGESTS


def test_another_seed_is_another_model_with_the_same_tokenizer(
    checkpoint: tiny.Checkpoint, tmp_path: Path
) -> None:
    other = tiny.build(tmp_path / "k3", seed=1)
    differing = {name for name, digest in checkpoint.files.items() if other.files[name] != digest}
    assert differing == {"model.safetensors"}


def test_a_weight_does_not_depend_on_the_others() -> None:
    one = Weight("a", (3, 5), 2.0, mean=1.0)
    assert one.draw(0).equal(one.draw(0))
    assert not one.draw(0).equal(one.draw(1))
    assert not one.draw(0).equal(Weight("b", (3, 5), 2.0, mean=1.0).draw(0))


def test_weights_are_normal_enough() -> None:
    drawn = Weight("a", (400_000,), 3.0, mean=-2.0).draw(0)
    assert drawn.mean().item() == pytest.approx(-2, abs=0.02)
    assert drawn.std().item() == pytest.approx(3, abs=0.02)
    assert drawn.abs().max().item() > 10


def test_every_mechanism_is_on(checkpoint: tiny.Checkpoint) -> None:
    text = json.loads((checkpoint.path / "config.json").read_text())["text_config"]
    assert text["linear_attn_config"]["gate_lower_bound"] == -5.0
    assert text["linear_attn_config"]["kda_layers"] == [1, 2, 3, 5, 6, 7]
    assert text["linear_attn_config"]["use_full_rank_gate"]
    assert text["mla_use_nope"]
    assert text["mla_use_output_gate"]
    assert text["attn_res_block_size"] < text["num_hidden_layers"]
    assert text["latent_moe_use_norm"]
    assert text["routed_expert_hidden_size"] < text["hidden_size"]
    assert text["hidden_act"] == "situ"
    assert text["max_position_embeddings"] == 32768
    assert text["num_shared_experts"] == 2


def test_holds_the_tensors_that_it_declares(checkpoint: tiny.Checkpoint) -> None:
    text = tiny.config()["text_config"]
    stored = load_file(checkpoint.path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {
        weight.name: weight.shape for weight in weights(text, TEXT_TOKENS)
    }
    assert sum(tensor.numel() for tensor in stored.values()) == checkpoint.parameters
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


def test_nothing_but_the_embedding_writes_what_routers_read(checkpoint: tiny.Checkpoint) -> None:
    for name, tensor in load_file(checkpoint.path / "model.safetensors").items():
        if WRITES_STREAM.search(name):
            assert not tensor[:ROUTING_DIMS].any(), name
            assert tensor[ROUTING_DIMS:].any(dim=1).all(), name
        if name.endswith("block_sparse_moe.gate.weight"):
            assert not tensor[:, ROUTING_DIMS:].any()
            assert tensor[:, :ROUTING_DIMS].all()


def test_the_likeliest_token_stands_clear(model: ReferenceModel, prompt: list[int]) -> None:
    best = model.logits(prompt).topk(2).values
    gaps = best[:, 0] - best[:, 1]
    assert (gaps < 1e-3).float().mean() < 0.01
    assert gaps.median() > 0.3


def test_rounding_changes_little(
    checkpoint: tiny.Checkpoint, model: ReferenceModel, prompt: list[int]
) -> None:
    exact = ReferenceModel.load(checkpoint.path, torch.float64).logits(prompt)
    assert (model.logits(prompt) - exact).abs().max() < 1e-3


@pytest.mark.slow
def test_output_does_not_run_in_circles(model: ReferenceModel, prompt: list[int]) -> None:
    for start in (prompt, prompt[:1], [TEXT_TOKENS - 1] * 100):
        tokens = [step.token for step in model.greedy(start, 96)]
        assert len(set(tokens)) > 64
        assert max(tokens) < TEXT_TOKENS  # no special token


def test_a_forgotten_beginning_shows(model: ReferenceModel, prompt: list[int]) -> None:
    whole = [step.token for step in model.greedy(prompt, 16)]
    assert [step.token for step in model.greedy(prompt[-64:], 16)] != whole
    assert [step.token for step in model.greedy(prompt[64:], 16)] != whole
    assert [step.token for step in model.greedy(prompt[:-65] + prompt[-1:], 16)] != whole


def test_building_again_changes_nothing(checkpoint: tiny.Checkpoint) -> None:
    before = {file: file.stat().st_mtime_ns for file in checkpoint.path.iterdir()}
    assert tiny.build(checkpoint.path) == checkpoint
    assert {file: file.stat().st_mtime_ns for file in checkpoint.path.iterdir()} == before
    assert tiny.read(checkpoint.path) == checkpoint
    assert not [path for path in checkpoint.path.parent.iterdir() if path != checkpoint.path]


def test_another_seed_replaces_the_checkpoint(tmp_path: Path) -> None:
    first = tiny.build(tmp_path / "k3")
    second = tiny.build(tmp_path / "k3", seed=3)
    assert first.files["model.safetensors"] != second.files["model.safetensors"]
    assert tiny.read(tmp_path / "k3") == second
    second.check_integrity()


def test_damage_is_found(tmp_path: Path) -> None:
    made = tiny.build(tmp_path / "k3")
    weights_file = made.path / "model.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    with pytest.raises(tiny.CheckpointError, match=r"safetensors is missing or damaged; delete"):
        tiny.build(made.path)
    weights_file.unlink()
    with pytest.raises(tiny.CheckpointError, match="missing"):
        made.check_integrity()


def test_an_unreadable_manifest_is_found(tmp_path: Path) -> None:
    made = tiny.build(tmp_path / "k3")
    (made.path / tiny.MANIFEST).write_text("{}")
    with pytest.raises(tiny.CheckpointError, match="delete"):
        tiny.read(made.path)


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(tiny.CheckpointError, match="holds something else"):
        tiny.build(tmp_path)
    with pytest.raises(tiny.CheckpointError, match="holds something else"):
        tiny.build(tmp_path / "thesis.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "k3").mkdir()
    tiny.build(tmp_path / "k3").check_integrity()


def test_nothing_is_left_of_a_build_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        tiny.build(tmp_path / "k3")
    assert list(tmp_path.iterdir()) == []


def test_the_command_reports_as_json(
    checkpoint: tiny.Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "build", "--output", str(tmp_path / "k3"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] == checkpoint.parameters
    assert report["sha256"] == DIGESTS["model.safetensors"]
    assert report["bytes"] == sum((tmp_path / "k3" / name).stat().st_size for name in checkpoint.files)


def test_the_command_builds_in_the_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGHAUL_STATE", str(tmp_path / "state"))
    assert main(["model", "build"]) == 0
    assert tiny.read(tmp_path / "state" / "models" / "k3-tiny") is not None
    assert "5,357,520" in capsys.readouterr().out


def test_the_command_says_why_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["model", "build", "--output", str(tmp_path)]) == 1
    assert "give a new or an empty directory" in capsys.readouterr().err


@pytest.mark.sglang
def test_transformers_loads_it_anywhere(checkpoint: tiny.Checkpoint, tmp_path: Path) -> None:
    """Away from this repository, with the code that travels in the checkpoint."""
    messages = [{"role": "user", "content": "Hello <|open|> there"}]
    code = f"""
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(checkpoint.path)!r}, trust_remote_code=True)
arguments = dict(conversation={messages!r}, tools=None, add_generation_prompt=True, thinking_effort="low")
ids = tokenizer.apply_chat_template(**arguments, tokenize=True, return_dict=False)
assert tokenizer.apply_chat_template(**arguments)["input_ids"] == ids
assert tokenizer.apply_chat_template(**arguments, tokenize=False) == tokenizer.decode(ids)
assert "model" not in sys.modules
special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
print(json.dumps([ids, special, len(tokenizer)]))
"""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        check=True,
        cwd=tmp_path,
        env=environment,
        text=True,
    )
    ids, special, size = json.loads(done.stdout.splitlines()[-1])
    own = K3Tokenizer.load(checkpoint.path)
    assert ids == own.encode_segments(conversation_segments(messages, thinking_effort="low"))
    assert special == [own.markup["[BOS]"], own.markup["[EOS]"], own.markup["[PAD]"]]
    assert size == VOCAB_SIZE
