import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from model import reference, tiny
from model.reference import Config, ReferenceError, ReferenceModel, Step, main

IDS = [(7 * n * n + 13 * n) % 2016 for n in range(90)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("reference") / "k3").path


@pytest.fixture(scope="module")
def model(path: Path) -> ReferenceModel:
    return ReferenceModel.load(path, torch.float64)


@pytest.fixture(scope="module")
def weights(path: Path) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}


def test_greedy_is_what_whole_sequences_say(model: ReferenceModel) -> None:
    steps = model.greedy(IDS, 24)
    logits = model.logits(IDS + [step.token for step in steps])[len(IDS) - 1 : -1]
    assert [step.token for step in steps] == logits.argmax(-1).tolist()
    best = logits.topk(2).values
    expected = torch.stack([logits.log_softmax(-1).amax(-1), best[:, 0] - best[:, 1]], dim=1)
    assert torch.tensor([[step.logprob, step.gap] for step in steps]).allclose(expected.float(), atol=1e-5)


def test_greedy_stops_at_and_with_a_token(model: ReferenceModel) -> None:
    steps = model.greedy(IDS, 24)
    at = next(n for n, step in enumerate(steps) if n > 4 and step.token not in {s.token for s in steps[:n]})
    assert model.greedy(IDS, 24, {steps[at].token}) == steps[: at + 1]


def test_a_token_does_not_see_the_future(model: ReferenceModel) -> None:
    assert model.logits(IDS)[:40].allclose(model.logits(IDS[:40]), atol=1e-9)


def test_every_token_sees_all_of_the_past(model: ReferenceModel) -> None:
    changed = [(IDS[0] + 1) % 2016, *IDS[1:]]
    assert (model.logits(changed) != model.logits(IDS)).any(-1).all()


def test_the_attention_matrix_may_be_cut(model: ReferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model.logits(IDS)
    monkeypatch.setattr(reference, "_QUERY_BLOCK", 7)
    assert model.logits(IDS).allclose(whole, atol=1e-10)


def test_the_last_tap_is_what_the_output_reads(model: ReferenceModel, weights: dict[str, Tensor]) -> None:
    taps = model.hidden_taps(IDS, [3, 7])
    assert taps.shape == (len(IDS), 2, 256)
    scale = torch.rsqrt(taps[:, 1].square().mean(-1, keepdim=True) + 1e-5)
    normed = taps[:, 1] * scale * weights["language_model.model.norm.weight"]
    assert (normed @ weights["language_model.lm_head.weight"].T).allclose(model.logits(IDS), atol=1e-9)


def test_a_tap_mixes_blocks_by_softmax(
    model: ReferenceModel, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 3 ends the first block: layer 4 reads the embedding and the sum of the four layers' outputs."""
    written: list[Tensor] = []
    for name in ("_kda", "_mla", "_ffn", "_moe"):
        inner = getattr(model, name)

        def record(*args: object, inner: object = inner) -> Tensor:
            output = inner(*args)  # pyright: ignore[reportCallIssue]
            written.append(output)
            return output

        monkeypatch.setattr(model, name, record)
    tap = model.hidden_taps(IDS, [3])[:, 0]
    # each of the layers 1 to 3 appends attention, shared experts, then experts with the shared ones added
    attention = [written[at] for at in (0, 2, 5, 8)]
    feed_forward = [written[at] for at in (1, 4, 7, 10)]
    embedding = weights["language_model.model.embed_tokens.weight"][IDS]
    rows = torch.stack([embedding, sum(attention) + sum(feed_forward)])
    reader = "language_model.model.layers.4.self_attention_res"
    normed = (
        rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5) * weights[f"{reader}_norm.weight"]
    )
    share = (normed @ weights[f"{reader}_proj.weight"][0]).exp()
    expected = (share / share.sum(0)).unsqueeze(-1) * rows
    assert tap.allclose(expected.sum(0), atol=1e-9)


def test_kda_is_the_gated_delta_rule(model: ReferenceModel, weights: dict[str, Tensor]) -> None:
    """Kimi Linear's equation with its matrices written out: S = (I - b k k^T) Diag(a) S + b k v^T."""
    at = "language_model.model.layers.1.self_attn"
    x = torch.randn(12, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def head(name: str, position: int) -> Tensor:
        projected = x @ weights[f"{at}.{name}_proj.weight"].T
        taps = weights[f"{at}.{name}_conv1d.weight"][:, 0]
        convolved = torch.zeros(128, dtype=torch.float64)
        for back in range(min(4, position + 1)):
            convolved += taps[:, 3 - back] * projected[position - back]
        return functional.silu(convolved).view(4, 32)

    memory = torch.zeros(4, 32, 32, dtype=torch.float64)
    reads = []
    for position in range(12):
        q, k, v = (head(name, position) for name in "qkv")
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / 32**0.5
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        forget = weights[f"{at}.f_b_proj.weight"] @ weights[f"{at}.f_a_proj.weight"] @ x[position]
        gate = torch.sigmoid(
            weights[f"{at}.A_log"].exp().unsqueeze(-1) * (forget + weights[f"{at}.dt_bias"]).view(4, 32)
        )
        beta = torch.sigmoid(weights[f"{at}.b_proj.weight"] @ x[position])
        for h in range(4):
            erase = torch.eye(32) - beta[h] * torch.outer(k[h], k[h])
            decay = torch.diag((-5.0 * gate[h]).exp())
            memory[h] = erase @ decay @ memory[h] + beta[h] * torch.outer(k[h], v[h])
        reads.append(torch.stack([memory[h].T @ q[h] for h in range(4)]))
    read = torch.stack(reads)
    normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + 1e-5) * weights[f"{at}.o_norm.weight"]
    gated = normed.flatten(1) * torch.sigmoid(x @ weights[f"{at}.g_proj.weight"].T)
    expected = gated @ weights[f"{at}.o_proj.weight"].T
    assert model._kda(1, x, reference._Sequence()).allclose(expected, atol=1e-9)


def test_mla_is_attention_over_expanded_latents(model: ReferenceModel, weights: dict[str, Tensor]) -> None:
    at = "language_model.model.layers.3.self_attn"
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def linear(name: str, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, weights[f"{at}.{name}.weight"])

    def norm(name: str, inputs: Tensor) -> Tensor:
        return functional.rms_norm(inputs, inputs.shape[-1:], weights[f"{at}.{name}.weight"], 1e-5)

    query = linear("q_b_proj", norm("q_a_layernorm", linear("q_a_proj", x))).view(20, 4, 48)
    compressed = linear("kv_a_proj_with_mqa", x)
    expanded = linear("kv_b_proj", norm("kv_a_layernorm", compressed[:, :64])).view(20, 4, 64)
    key = torch.cat([expanded[..., :32], compressed[:, None, 64:].expand(20, 4, 16)], dim=-1)
    read = functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), expanded[..., 32:].transpose(0, 1), is_causal=True
    )
    gated = read.transpose(0, 1).flatten(1) * torch.sigmoid(linear("g_proj", x))
    expected = linear("o_proj", gated)
    assert model._mla(3, x, reference._Sequence()).allclose(expected, atol=1e-9)


def test_the_moe_weighs_the_chosen_experts(model: ReferenceModel, weights: dict[str, Tensor]) -> None:
    at = "language_model.model.layers.2.block_sparse_moe"
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def situ(gate: Tensor, up: Tensor) -> Tensor:
        return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)

    expected = []
    for token in x:
        score = torch.sigmoid(weights[f"{at}.gate.weight"] @ token)
        ranked = (score + weights[f"{at}.gate.e_score_correction_bias"]).argsort(descending=True)
        chosen = ranked[:2].tolist()
        narrow = weights[f"{at}.routed_expert_down_proj.weight"] @ token
        routed = torch.zeros(128, dtype=torch.float64)
        for expert in chosen:
            w1, w3, w2 = (weights[f"{at}.experts.{expert}.{name}.weight"] for name in ("w1", "w3", "w2"))
            routed += score[expert] / score[chosen].sum() * (w2 @ situ(w1 @ narrow, w3 @ narrow))
        normed = functional.rms_norm(routed, (128,), weights[f"{at}.routed_expert_norm.weight"], 1e-5)
        gate, up, down = (weights[f"{at}.shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down"))
        shared = down @ situ(gate @ token, up @ token)
        expected.append(weights[f"{at}.routed_expert_up_proj.weight"] @ normed + shared)
    at = at.removeprefix("language_model.")
    assert model._moe(at, x).allclose(torch.stack(expected), atol=1e-9)


@pytest.mark.parametrize(
    ("ids", "said"), [([], "no ids"), ([1, 2048], "outside the vocabulary"), ([-1], "outside the vocabulary")]
)
def test_bad_ids_are_refused(model: ReferenceModel, ids: list[int], said: str) -> None:
    for call in (model.logits, lambda ids: model.greedy(ids, 1), lambda ids: model.hidden_taps(ids, [0])):
        with pytest.raises(ReferenceError, match=said):
            call(ids)


def test_layers_that_do_not_exist_are_refused(model: ReferenceModel) -> None:
    with pytest.raises(ReferenceError, match="there are 8"):
        model.hidden_taps(IDS, [0, 8])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mla_use_output_gate": False}, "mla_use_output_gate"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"num_expert_group": 4}, "num_expert_group"),
        ({"hidden_size": None}, "no configuration"),
    ],
)
def test_what_it_does_not_cover_is_refused(
    path: Path, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= change
    if None in change.values():
        config["text_config"].pop(*change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReferenceError, match=said):
        Config.read(tmp_path)


def test_a_directory_without_weights_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ReferenceError, match="no configuration"):
        ReferenceModel.load(tmp_path)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(ReferenceError, match="safetensors"):
        ReferenceModel.load(tmp_path)


def test_reads_sharded_checkpoints(path: Path, tmp_path: Path, model: ReferenceModel) -> None:
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    tensors = sorted(load_file(path / "model.safetensors").items())
    for shard in range(2):
        save_file(dict(tensors[shard::2]), tmp_path / f"model-{shard}.safetensors")
    assert ReferenceModel.load(tmp_path, torch.float64).logits(IDS[:5]).equal(model.logits(IDS[:5]))


def test_the_command_continues_ids(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ReferenceModel.load(path).greedy([1, 2, 3], 5)
    monkeypatch.setattr("sys.stdin", io.StringIO("[1, 2, 3]"))
    for ids in ("1,2,3", "-"):
        assert main(["--model", str(path), "--ids", ids, "--tokens", "5", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert list(map(Step, report["tokens"], report["logprobs"], report["gaps"])) == steps
    assert main(["--model", str(path), "--ids", "1,2,3", "--tokens", "5"]) == 0
    assert str(steps[-1].token) in capsys.readouterr().out


def test_the_command_may_generate_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(path), "--ids", "1", "--tokens", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tokens": [], "logprobs": [], "gaps": []}


@pytest.mark.parametrize("ids", ["", "a", "1.5", "1,true", "99999"])
def test_the_command_refuses_bad_ids(path: Path, ids: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(path), "--ids", ids]) == 2
    assert "ids" in capsys.readouterr().err
