"""The smaller operators against plain formulas, written out here."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.cpu.adapters import scatter_states
from model.cpu.attention import attend
from model.cpu.norm import rms_norm_gated
from model.cpu.residual import mix_residuals
from model.cpu.sampling import verify_chain
from model.cpu.slots import assign_slots, last_slots, read_slots
from model.cpu.state import commit_states, snapshot_states
from model.cpu.transfer import load_layer, load_rows, save_layers, save_rows


def test_gated_norm() -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(3, 2, 8), torch.randn(3, 16), torch.randn(8)
    y = torch.nn.functional.rms_norm(x, (8,), weight, eps=1e-5)
    got = rms_norm_gated(x, gate, weight, eps=1e-5, gate_activation="sigmoid")
    torch.testing.assert_close(got, y * torch.sigmoid(gate.view(3, 2, 8)))
    got = rms_norm_gated(x, gate, None, eps=1e-5, gate_activation="swish")
    bare = torch.nn.functional.rms_norm(x, (8,), None, eps=1e-5)
    torch.testing.assert_close(got, bare * torch.nn.functional.silu(gate.view(3, 2, 8)))
    with pytest.raises(ValueError, match="gate_activation 'relu'"):
        rms_norm_gated(x, gate, weight, eps=1e-5, gate_activation="relu")


@pytest.mark.parametrize("snapshots", [0, 1, 4])
def test_residual_mixture(snapshots: int) -> None:
    torch.manual_seed(0)
    prefix, bank, score = torch.randn(5, 8), torch.randn(5, snapshots, 8), torch.randn(8)
    rows = torch.cat((bank, prefix.unsqueeze(1)), dim=1)
    normed = torch.nn.functional.rms_norm(rows, (8,), None, eps=1e-5)
    weights = torch.softmax(normed @ score, dim=-1)
    torch.testing.assert_close(
        mix_residuals(prefix, bank, score, eps=1e-5), torch.einsum("tr,trh->th", weights, rows)
    )


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    count, heads, _ = q.shape
    length, groups = k.shape[:2]
    out = torch.zeros(count, heads, v.shape[-1])
    for i in range(count):
        seen = length - count + i + 1 if causal else length
        for h in range(heads):
            g = h // (heads // groups)
            out[i, h] = torch.softmax(k[:seen, g] @ q[i, h] * scale, dim=0) @ v[:seen, g]
    return out


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 9),
    prefix=st.integers(0, 9),
    groups=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_attention_over_a_prefix(count: int, prefix: int, groups: int, causal: bool, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = (
        torch.randn(count, 4, 8),
        torch.randn(count + prefix, groups, 8),
        torch.randn(count + prefix, groups, 8),
    )
    got = attend(q, k, v, scale=0.3, causal=causal)
    torch.testing.assert_close(got, naive_attention(q, k, v, 0.3, causal), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 5])
def test_absorbed_mla_reads_its_value_from_the_key(count: int) -> None:
    torch.manual_seed(0)
    q, latent = torch.randn(count, 4, 12), torch.randn(9, 1, 12)
    got = attend(q, latent, latent[..., :8], scale=0.3, causal=True, shared=True)
    want = naive_attention(q, latent, latent[..., :8], 0.3, causal=True)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def chain_by_hand(
    candidates: list[int], target: torch.Tensor, draft: torch.Tensor, coins: list[float], final: float
) -> tuple[int, int]:
    kept = 0
    while kept < len(candidates) - 1:
        token = candidates[kept + 1]
        p, q = float(target[kept, token]), float(draft[kept, token])
        if not (0 < q <= 1 and coins[kept] * q < p):
            break
        kept += 1
    rest = target[kept].clone()
    if kept < len(candidates) - 1:
        rest = (rest - draft[kept]).clamp(min=0)
    goal, mass = final * float(rest.sum()), 0.0
    for token, weight in enumerate(rest.tolist()):
        mass += weight
        if mass > goal:
            return kept, token
    return kept, len(rest) - 1


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 3), drafted=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_chain_verification(batch: int, drafted: int, seed: int) -> None:
    torch.manual_seed(seed)
    vocabulary = 7
    target = torch.softmax(torch.randn(batch, drafted + 1, vocabulary, dtype=torch.float64), -1).float()
    draft = torch.softmax(torch.randn(batch, drafted, vocabulary, dtype=torch.float64), -1).float()
    candidates = torch.randint(0, vocabulary, (batch, drafted + 1))
    coins, final = torch.rand(batch, drafted), torch.rand(batch)
    accepted, sampled = verify_chain(candidates, target, draft, coins, final)
    for b in range(batch):
        want = chain_by_hand(candidates[b].tolist(), target[b], draft[b], coins[b].tolist(), float(final[b]))
        assert (int(accepted[b]), int(sampled[b])) == want


def test_chain_verification_keeps_the_target_distribution() -> None:
    """The point of rejection sampling: whatever the draft proposes, tokens follow the target."""
    torch.manual_seed(0)
    rounds = 40_000
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.1, 0.8])
    drafted = torch.multinomial(q, rounds, replacement=True)
    candidates = torch.stack((torch.zeros(rounds, dtype=torch.long), drafted), dim=1)
    accepted, sampled = verify_chain(
        candidates,
        p.expand(rounds, 2, 3),
        q.expand(rounds, 1, 3),
        torch.rand(rounds, 1),
        torch.rand(rounds),
    )
    first = torch.where(accepted == 1, drafted, sampled)
    seen = torch.bincount(first, minlength=3) / rounds
    torch.testing.assert_close(seen, p, atol=0.01, rtol=0)


def test_improbable_draft_tokens_are_rejected() -> None:
    target = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    for q in (0.0, float("nan"), 2.0):
        accepted, _ = verify_chain(
            torch.tensor([[0, 1]]), target, torch.tensor([[[0.5, q]]]), torch.zeros(1, 1), torch.zeros(1)
        )
        assert int(accepted[0]) == 0


def test_snapshots_follow_the_mask() -> None:
    conv, ssm = torch.randn(2, 5, 3), torch.randn(2, 5, 4)
    before = conv.clone(), ssm.clone()
    snapshot_states(
        (conv, ssm),
        torch.tensor([0, 1, -1, 2]),
        torch.tensor([True, False, True, True]),
        torch.tensor([3, 4, 4, -1]),
    )
    for now, was in zip((conv, ssm), before, strict=True):
        assert torch.equal(now[:, 3], was[:, 0])
        assert torch.equal(now[:, [0, 1, 2, 4]], was[:, [0, 1, 2, 4]])


@pytest.mark.parametrize("rows", [None, torch.tensor([2, 0, 1])])
def test_commits_take_the_accepted_step(rows: torch.Tensor | None) -> None:
    pool, steps = torch.randn(2, 6, 3), torch.randn(2, 3, 4, 3)
    before, again = pool.clone(), pool.clone()
    commit_states(pool, steps, targets=torch.tensor([5, 1, 3]), accepted=torch.tensor([2, -1, 0]), rows=rows)
    scatter_states(again, steps, torch.tensor([5, 1, 3]), torch.tensor([2, -1, 0]), rows)
    assert torch.equal(again, pool), "in the order of arguments that SGLang has"
    first, third = (0, 2) if rows is None else (2, 1)
    assert torch.equal(pool[:, 5], steps[:, first, 2])
    assert torch.equal(pool[:, 3], steps[:, third, 0])
    assert torch.equal(pool[:, [0, 1, 2, 4]], before[:, [0, 1, 2, 4]])


def test_slot_table() -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    assign_slots(
        table, torch.tensor([2, 0, 1]), torch.tensor([1, 0, 3]), torch.tensor([3, 0, 6]), torch.arange(10, 15)
    )
    assert table.tolist() == [[0] * 8, [0, 0, 0, 12, 13, 14, 0, 0], [0, 10, 11, 0, 0, 0, 0, 0]]
    assert last_slots(table, torch.tensor([2, 0, 1]), torch.tensor([3, 0, 6])).tolist() == [11, -1, 14]
    read = read_slots(table, torch.tensor([2, 1]), torch.tensor([1, 4]), torch.tensor([3, 6]))
    assert read.tolist() == [*table[2, 1:3].tolist(), *table[1, 4:6].tolist()] and read.dtype == torch.int64


@pytest.mark.parametrize("page_size", [1, 4])
def test_host_copies_round_trip(page_size: int) -> None:
    torch.manual_seed(0)
    layers = [torch.randn(12, 1, 5) for _ in range(3)]
    host = torch.zeros(12 // page_size, 3, page_size, 1, 5)
    source, target = torch.arange(8), torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
    save_layers(layers, [host], source, target, page_size)
    for layer in range(3):
        for s, t in zip(source.tolist(), target.tolist(), strict=True):
            assert torch.equal(host[t // page_size, layer, t % page_size], layers[layer][s])
    restored = [torch.zeros(12, 1, 5) for _ in range(3)]
    for layer in range(3):
        load_layer([host], [restored[layer]], target, source, layer, page_size)
        assert torch.equal(restored[layer][:8], layers[layer][:8])
        assert torch.equal(restored[layer][8:], torch.zeros(4, 1, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_byte_copies_round_trip(dtype: torch.dtype) -> None:
    layers = [torch.randn(12, 1, 5).to(dtype) for _ in range(3)]
    host = torch.zeros(20, 3, 1, 5, dtype=dtype)
    addresses = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    source, target = torch.tensor([11, 3, 4]), torch.tensor([0, 19, 7])
    row_bytes = 5 * dtype.itemsize
    save_rows(addresses, host, source, target, row_bytes)
    for layer in range(3):
        assert torch.equal(host[target, layer], layers[layer][source])
    untouched = [slot for slot in range(20) if slot not in target.tolist()]
    assert not host[untouched].any()
    restored = torch.zeros(12, 1, 5, dtype=dtype)
    load_rows(host, restored, target, torch.tensor([1, 2, 9]), 2, row_bytes)
    assert torch.equal(restored[[1, 2, 9]], layers[2][source])
    assert not restored[[0, 3, 4, 5, 6, 7, 8, 10, 11]].any()
    save_rows(addresses, host, source[:0], target[:0], row_bytes)
