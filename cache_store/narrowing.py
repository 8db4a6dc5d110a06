"""float32 stored as bfloat16: half the bytes, 8 bits of significand in place of 24.

Rounded to the nearest, ties to even, as torch does; NaN stays NaN. Widening is exact, so storing what was
restored loses nothing more. NumPy, in blocks that stay in the processor's cache.
"""

import numpy as np

_BLOCK = 32_768


def narrow(source: memoryview, target: memoryview) -> None:
    """Write the float32 numbers in `source` (bytes) to `target`, half as long, as bfloat16."""
    numbers, result = np.frombuffer(source, np.uint32), np.frombuffer(target, np.uint16)
    assert len(numbers) == len(result), f"{len(source)} bytes into {len(target)}"
    for at in range(0, len(numbers), _BLOCK):
        block = numbers[at : at + _BLOCK]
        rounded = (block >> np.uint32(16)) & np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += block
        rounded >>= np.uint32(16)
        lost = (block & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
        if lost.any():
            rounded[lost] = (block[lost] >> np.uint32(16)) | np.uint32(0x40)
        result[at : at + _BLOCK] = rounded


def widen(source: memoryview, target: memoryview) -> None:
    """Write the bfloat16 numbers in `source` (bytes) to `target`, twice as long, as float32."""
    numbers, result = np.frombuffer(source, np.uint16), np.frombuffer(target, np.uint32)
    assert len(numbers) == len(result), f"{len(source)} bytes into {len(target)}"
    for at in range(0, len(numbers), _BLOCK):
        block = result[at : at + _BLOCK]
        block[:] = numbers[at : at + _BLOCK]
        block <<= np.uint32(16)
