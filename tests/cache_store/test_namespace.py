import json
import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store import namespace
from cache_store.namespace import Parallelism, PoolGeometry

KV = PoolGeometry(
    name="kv",
    kind="MLATokenToKVPoolHost",
    layout="page_first",
    page_tokens=64,
    layers=(0, 24, 24),
    arrays=(("kv_cache_dim", "torch.bfloat16", (576,)),),
    component_bytes=(1_769_472,),
)
MAMBA = PoolGeometry(
    name="mamba",
    kind="MambaPoolHost",
    layout="page_first",
    page_tokens=1,
    layers=(0, 69, 69),
    arrays=(("temporal", "torch.float32", (96, 128, 128)), ("conv0", "torch.bfloat16", (36_864, 3))),
    component_bytes=(434_110_464, 15_261_696),
)


def space(**changes: object) -> bytes:
    arguments = {
        "weights": "f" * 32,
        "engine": {"dtype": "bfloat16", "quantization": None},
        "parallelism": Parallelism(tp_size=8),
        "pools": [KV, MAMBA],
        "salt": "",
    }
    return namespace.namespace(**(arguments | changes))  # pyright: ignore[reportArgumentType]


def test_everything_that_matters_parts_namespaces():
    spaces = [
        space(),
        space(weights="e" * 32),
        space(engine={"dtype": "float32", "quantization": None}),
        space(engine={"dtype": "bfloat16", "quantization": "fp8"}),
        space(parallelism=Parallelism(tp_size=4)),
        space(parallelism=Parallelism(tp_size=8, pp_size=2)),
        space(parallelism=Parallelism(tp_size=8, cp_size=2)),
        space(salt="blue"),
        space(pools=[KV]),
        space(pools=[replace(KV, layout="page_first_direct"), MAMBA]),
        space(pools=[replace(KV, page_tokens=128), MAMBA]),
        space(pools=[replace(KV, layers=(0, 23, 23)), MAMBA]),
        space(pools=[replace(KV, kind="Other"), MAMBA]),
        space(pools=[replace(KV, arrays=(("kv_cache_dim", "torch.float8_e4m3fn", (576,)),)), MAMBA]),
        space(pools=[replace(KV, component_bytes=(884_736,)), MAMBA]),
        space(pools=[KV, replace(MAMBA, arrays=(("temporal", "torch.bfloat16", (96, 128, 128)),))]),
    ]
    assert len(set(spaces)) == len(spaces)
    assert all(len(found) == 16 for found in spaces)


def test_ranks_and_order_do_not():
    assert space(parallelism=Parallelism(tp_rank=3, tp_size=8)) == space()
    assert space(pools=[MAMBA, KV]) == space()
    assert space(engine={"quantization": None, "dtype": "bfloat16"}) == space()


def test_a_drafts_namespace_hangs_on_the_target_its_weights_and_its_shape():
    draft = replace(KV, name="draft", layers=(0, 5, 5))
    spaces = [
        namespace.derived(space(), draft, "a"),
        namespace.derived(space(), draft, "b"),
        namespace.derived(space(), replace(draft, layers=(0, 3, 3)), "a"),
        namespace.derived(space(salt="blue"), draft, "a"),
    ]
    assert len({*spaces, space()}) == 5


def test_the_shard_names_whose_part_it_is():
    assert Parallelism().shard(replicated=True) == ""
    assert Parallelism().shard(replicated=False) == "t0.1"
    assert Parallelism(tp_rank=3, tp_size=8).shard(replicated=True) == ""
    assert Parallelism(tp_rank=3, tp_size=8).shard(replicated=False) == "t3.8"
    stage = Parallelism(tp_rank=1, tp_size=2, pp_rank=1, pp_size=4, cp_rank=0, cp_size=2)
    assert stage.shard(replicated=True) == "p1.4.c0.2"
    assert stage.shard(replicated=False) == "t1.2.p1.4.c0.2"


def test_ranks_beyond_their_size_are_refused():
    for arguments in ({"tp_rank": 1}, {"pp_rank": -1}, {"cp_rank": 2, "cp_size": 2}):
        with pytest.raises(AssertionError):
            Parallelism(**arguments)


names = st.text(st.characters(codec="utf-8", exclude_characters=":"), min_size=1, max_size=20)


def key(space: bytes, pool: str, page: str, shard: str = "") -> bytes:
    return namespace.page_keys(space, pool, [page], shard)[0]


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), names, names)
def test_keys_differ_where_anything_does(one: bytes, two: bytes, page: str, other: str):
    keys = {
        key(one, "kv", page),
        key(one, "mamba", page),
        key(one, "mamba", page, "t0.2"),
        key(one, "mamba", page, "t1.2"),
    }
    assert len(keys) == 4
    assert all(found.startswith(namespace.key_prefix(one)) for found in keys)
    assert (key(one, "kv", page) == key(one, "kv", other)) == (page == other)
    if one[:8] != two[:8]:
        assert key(one, "kv", page) != key(two, "kv", page)


def checkpoint(directory: Path, payload: bytes = b"", config: dict[str, object] | None = None) -> Path:
    directory.mkdir()
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}})
    blob = struct.pack("<Q", len(header)) + header.encode() + payload
    (directory / "model.safetensors").write_bytes(blob)
    (directory / "config.json").write_text(json.dumps(config or {"architectures": ["K3"], "layers": 2}))
    return directory


def test_the_fingerprint_is_the_same_for_a_copy_and_another_for_other_weights(tmp_path: Path):
    payload = random.Random(0).randbytes(3_000_000)
    original = namespace.weights_fingerprint(checkpoint(tmp_path / "a", payload))
    assert namespace.weights_fingerprint(checkpoint(tmp_path / "b", payload)) == original
    tuned = bytes(byte ^ 1 for byte in payload)
    assert namespace.weights_fingerprint(checkpoint(tmp_path / "c", tuned)) != original
    assert namespace.weights_fingerprint(checkpoint(tmp_path / "d", payload[:-1] + b"x")) != original
    assert namespace.weights_fingerprint(checkpoint(tmp_path / "e", payload + b"x")) != original
    assert namespace.weights_fingerprint(checkpoint(tmp_path / "f", payload, {"layers": 3})) != original


def test_who_wrote_a_config_does_not_matter(tmp_path: Path):
    config = {"layers": 2}
    noisy = {"transformers_version": "5", "_name_or_path": "/somewhere", "layers": 2}
    assert namespace.weights_fingerprint(
        checkpoint(tmp_path / "a", b"x", config)
    ) == namespace.weights_fingerprint(checkpoint(tmp_path / "b", b"x", noisy))


def test_every_shard_counts(tmp_path: Path):
    one, two = checkpoint(tmp_path / "a", b"x" * 100), checkpoint(tmp_path / "b", b"x" * 100)
    (two / "model-2.safetensors").write_bytes((two / "model.safetensors").read_bytes())
    assert namespace.weights_fingerprint(one) != namespace.weights_fingerprint(two)


def test_dummy_weights_are_known_by_the_configuration_alone(tmp_path: Path):
    directory = checkpoint(tmp_path / "a", b"x" * 5000)
    dummy = namespace.weights_fingerprint(directory, is_dummy=True)
    assert namespace.weights_fingerprint(directory) != dummy
    (directory / "model.safetensors").unlink()
    assert namespace.weights_fingerprint(directory, is_dummy=True) == dummy
    (directory / "config.json").write_text('{"layers": 9}')
    assert namespace.weights_fingerprint(directory, is_dummy=True) != dummy


def test_no_checkpoint_is_an_error_that_says_so(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        namespace.weights_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no weight file"):
        namespace.weights_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="not a safetensors file"):
        namespace.weights_fingerprint(tmp_path)
