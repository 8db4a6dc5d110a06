"""A padded K3 is the same function, and an engine on a GPU refuses one that isn't padded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import tiny
from model.kernel_sizes import complaint, fitting_hidden
from model.padding import Growth, PaddingError, k3_rules, pad, pad_tensors
from model.profile import ProfileError, load_profile
from model.reference import ReferenceModel
from model.tiny_weights import weights
from service.cli import main

PROMPT = torch.randint(0, 256, (80,), generator=torch.Generator().manual_seed(1)).tolist()


def write_k3(path: Path, dtype: torch.dtype = torch.float32, **sizes: int) -> Path:
    """A random K3 of three KDA layers and one MLA layer, the first dense; `sizes` override its config."""
    config = tiny.config()
    text: dict[str, Any] = config["text_config"]
    text |= {
        "vocab_size": 256,
        "num_hidden_layers": 4,
        "attn_res_block_size": 2,
        "qk_rope_head_dim": 32,
        "num_experts": 4,
        **sizes,
    }
    text["linear_attn_config"] |= {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    config["vision_config"]["text_hidden_size"] = text["hidden_size"]
    path.mkdir()
    tensors = {weight.name: weight.draw(0).to(dtype) for weight in weights(text, 240)}
    names = sorted(tensors)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    for number, part in enumerate(parts, 1):
        save_file({name: tensors[name] for name in part}, path / f"model-{number}.safetensors")
    index = {name: f"model-{number}.safetensors" for number, part in enumerate(parts, 1) for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "longhaul.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_k3(tmp_path_factory.mktemp("small") / "k3", hidden_size=384, kv_lora_rank=128)


@pytest.fixture(scope="module")
def padded(small: Path) -> Path:
    assert pad(small, small.with_name("padded"))["padded"]
    return small.with_name("padded")


@pytest.fixture(scope="module")
def before(small: Path) -> torch.Tensor:
    return ReferenceModel.load(small).logits(PROMPT)


def assert_same(before: torch.Tensor, after: torch.Tensor) -> None:
    assert (before - after).abs().max() <= 1e-4 * before.abs().max()
    assert before.argmax(-1).equal(after.argmax(-1))


def test_computes_the_same(padded: Path, before: torch.Tensor) -> None:
    assert_same(before, ReferenceModel.load(padded).logits(PROMPT))


def test_taps_of_a_draft_hold_two_copies_and_zeros(small: Path, padded: Path) -> None:
    old, new = (ReferenceModel.load(path).hidden_taps(PROMPT[:20], [1, 3]) for path in (small, padded))
    assert new.shape[-1] == 1024
    for copy in (new[..., :384], new[..., 384:768]):
        torch.testing.assert_close(copy, old, rtol=1e-4, atol=1e-4)
    assert not new[..., 768:].any()


def test_the_exact_size_differs_by_rounding_of_arithmetic_alone(small: Path, tmp_path: Path) -> None:
    summary = pad(small, tmp_path / "padded", exact=True)
    assert (summary["hidden_size"], summary["exact"]) == ([384, 3072], True)
    old, new = (
        ReferenceModel.load(path, torch.float64).logits(PROMPT[:20]) for path in (small, tmp_path / "padded")
    )
    assert (old - new).abs().max() <= 1e-11 * old.abs().max()


def test_only_norms_of_an_inexact_size_change_their_type(tmp_path: Path) -> None:
    source = write_k3(tmp_path / "k3", torch.bfloat16, hidden_size=384, kv_lora_rank=128)
    pad(source, tmp_path / "padded")
    stored = {
        name: tensor
        for file in (tmp_path / "padded").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    changed = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert changed == {name for name in stored if name.endswith("norm.weight")} - {
        name
        for name in stored
        if name.endswith((".o_norm.weight", "a_layernorm.weight", "expert_norm.weight"))
    }
    assert_same(
        ReferenceModel.load(source).logits(PROMPT), ReferenceModel.load(tmp_path / "padded").logits(PROMPT)
    )


def test_a_latent_of_512_goes_with_a_shared_key_of_64(tmp_path: Path) -> None:
    source = write_k3(tmp_path / "k3", hidden_size=1024, kv_lora_rank=192, qk_rope_head_dim=64)
    summary = pad(source, tmp_path / "padded")
    assert (summary["hidden_size"], summary["kv_lora_rank"]) == ([1024, 1024], [192, 512])
    assert_same(
        ReferenceModel.load(source).logits(PROMPT[:20]),
        ReferenceModel.load(tmp_path / "padded").logits(PROMPT[:20]),
    )


def test_writes_a_whole_checkpoint(padded: Path) -> None:
    config = json.loads((padded / "config.json").read_text())
    assert (config["text_config"]["hidden_size"], config["text_config"]["kv_lora_rank"]) == (1024, 256)
    assert config["vision_config"]["text_hidden_size"] == 1024
    assert sorted(file.name for file in padded.iterdir()) == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    index = json.loads((padded / "model.safetensors.index.json").read_text())
    files = {name: load_file(padded / name) for name in set(index["weight_map"].values())}
    assert all(name in files[file] for name, file in index["weight_map"].items())
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == size


def test_leaves_alone_what_fits(padded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "again"
    assert main(["model", "pad", "--model", str(padded), "--output", str(output), "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert (answer["padded"], answer["path"]) == (False, str(padded))
    assert "fits already" in captured.err
    assert not output.exists()


def test_refuses_a_directory_that_holds_something(small: Path, padded: Path) -> None:
    with pytest.raises(PaddingError, match="holds something already"):
        pad(small, padded)


def test_a_tensor_without_a_rule_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = write_k3(tmp_path / "k3", hidden_size=384, kv_lora_rank=128)
    name = "language_model.model.layers.2.self_attn.o_proj.bias"
    save_file({name: torch.zeros(384)}, source / "model-3.safetensors")
    with pytest.raises(PaddingError, match=r"layers\.2\.self_attn\.o_proj\.bias \[384\]: there is no rule"):
        pad(source, tmp_path / "padded")
    assert [path.name for path in tmp_path.iterdir()] == ["k3"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    source = write_k3(tmp_path / "k3", hidden_size=384, kv_lora_rank=128)
    (source / "model-2.safetensors").write_bytes(b"0")
    with pytest.raises(PaddingError, match=r"model-2\.safetensors can't be read"):
        pad(source, tmp_path / "padded")


def test_a_tensor_of_another_shape_is_refused() -> None:
    rules = k3_rules(Growth(384, 1024), Growth(128, 256), 32)
    name = "language_model.model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
    with pytest.raises(PaddingError, match=r"kv_a_proj_with_mqa\.weight \[128, 384\]: .* \[160, 384\]"):
        pad_tensors({name: torch.zeros(128, 384)}, rules)


def test_a_shared_key_that_no_kernel_takes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "tiny"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(tiny.config()))
    assert main(["model", "pad", "--model", str(source), "--output", str(tmp_path / "padded")]) == 1
    assert "qk_rope_head_dim 16 can't be padded" in capsys.readouterr().err
    assert "no padding helps" in (complaint(source) or "")


def test_next_sizes() -> None:
    assert [fitting_hidden(size) for size in (1, 384, 1024, 1025, 7168)] == [1024, 1024, 1024, 2048, 7168]
    assert [fitting_hidden(size, exact=True) for size in (384, 1024, 1536, 2048)] == [3072, 1024, 3072, 2048]


def write_sizes(path: Path, hidden: int, latent: int, shared_key: int) -> Path:
    path.mkdir()
    text = {"hidden_size": hidden, "kv_lora_rank": latent, "qk_rope_head_dim": shared_key}
    (path / "config.json").write_text(json.dumps({"text_config": text}))
    return path


def test_a_gpu_takes_the_sizes_of_the_released_model(tmp_path: Path) -> None:
    path = write_sizes(tmp_path / "k3", 7168, 512, 64)
    assert load_profile("h200-slice").command(path, 30000).argv


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((384, 128, 32), "hidden_size 384, .* multiples of 1024 alone"),
        ((1024, 128, 32), r"kv_lora_rank 128 \+ qk_rope_head_dim 32, .* 256 \+ 32 or 512 \+ 64 alone"),
    ],
)
def test_a_gpu_refuses_sizes_that_it_computes_wrongly(
    tmp_path: Path, sizes: tuple[int, int, int], reason: str
) -> None:
    path = write_sizes(tmp_path / "k3", *sizes)
    with pytest.raises(ProfileError, match=f"{reason}.*longhaul model pad --model {path}"):
        load_profile("h200-slice").command(path, 30000)
    assert load_profile("cpu-tiny").command(path, 30000).argv


def test_a_gpu_refuses_a_draft_of_another_size(tmp_path: Path) -> None:
    path, draft = write_sizes(tmp_path / "k3", 1024, 256, 32), tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text('{"hidden_size": 384}')
    with pytest.raises(ProfileError, match=f"hidden_size 384, .*longhaul draft pad --draft {draft}"):
        load_profile("h200-slice").command(path, 30000, draft=draft)


def test_the_engine_s_command_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sizes(tmp_path / "k3", 384, 128, 32)
    assert main(["engine", "--dry-run", "--profile", "h200-slice", "--model", str(path)]) == 2
    assert "longhaul model pad" in capsys.readouterr().err


def test_runs_with_torch_and_safetensors_alone(small: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('rich', 'pydantic', 'tokenizers', 'sglang')))\n"
        "from model.padding import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--model", str(small), "--output", str(tmp_path / "padded"), "--json"]
    root = Path(tiny.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=root, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["padded"]
