import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_store.narrowing import narrow, widen


def narrowed(numbers: np.ndarray) -> np.ndarray:
    target = bytearray(numbers.nbytes // 2)
    narrow(memoryview(numbers).cast("B"), memoryview(target))
    return np.frombuffer(target, np.uint16)


def widened(numbers: np.ndarray) -> np.ndarray:
    target = bytearray(numbers.nbytes * 2)
    widen(memoryview(numbers).cast("B"), memoryview(target))
    return np.frombuffer(target, np.float32)


def same_as_torch(bits: np.ndarray) -> None:
    numbers = bits.view(np.float32)
    expected = torch.from_numpy(numbers.copy()).to(torch.bfloat16)
    found = narrowed(numbers)
    is_nan = np.isnan(numbers)
    assert (found[~is_nan] == expected.view(torch.uint16).numpy()[~is_nan]).all()
    assert np.isnan(widened(found)[is_nan]).all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_bits_become_what_torch_makes_of_them(bits: list[int]):
    same_as_torch(np.array(bits, np.uint32))


def test_many_blocks_and_all_borders():
    rng = np.random.default_rng(0)
    same_as_torch(rng.integers(0, 2**32, 100_001, dtype=np.uint32))
    borders = [
        0,
        0x80000000,
        0x7F7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7F800001,
        0xFFFFFFFF,
        0x3F808000,
        0x3F818000,
    ]
    same_as_torch(np.array(borders, np.uint32))


def test_what_was_narrowed_once_loses_nothing_more():
    numbers = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    once = widened(narrowed(numbers))
    assert (widened(narrowed(once)) == once).all()
    assert (np.abs(once - numbers) <= np.abs(numbers) / 256).all()


def test_lengths_must_fit():
    with pytest.raises(AssertionError):
        narrow(memoryview(bytes(8)), memoryview(bytearray(8)))
    with pytest.raises(AssertionError):
        widen(memoryview(bytes(8)), memoryview(bytearray(8)))
