"""The machines that capacity is planned for."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes of one kind, serving one K3.

    `profile` is the launch profile whose memory settings count. Rates are of the whole: `prefill_tokens_s`
    computed prompt tokens a second, `decode_tokens_s` output tokens a second of one request,
    `host_bytes_s` from host memory to one GPU, `store_bytes_s` from Redis, all ranks together; `request_s` is
    what a prefill takes beside its tokens. `assumed` names the rates that nobody has measured on it; they are
    options of the commands.
    """

    name: str
    profile: str
    nodes: int
    gpus: int
    hbm_bytes: int
    prefill_tokens_s: float
    decode_tokens_s: float
    host_bytes_s: float = 50e9
    store_bytes_s: float = 5e9
    request_s: float = 0.0
    assumed: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Tensor parallel ranks: all GPUs."""
        return self.nodes * self.gpus


MACHINES: Final[dict[str, Machine]] = {
    machine.name: machine
    for machine in (
        Machine(
            "b300-8",
            "b300-8",
            nodes=1,
            gpus=8,
            hbm_bytes=288_000_000_000,
            # SGLang's cookbook, B300 x 8, 8K/1K, concurrency 1: TTFT 378 ms.
            prefill_tokens_s=8192 / 0.378,
            decode_tokens_s=60.0,
            assumed=("decode_tokens_s", "host_bytes_s", "store_bytes_s"),
        ),
        Machine(
            "h200-8",
            "h200-2x8",
            nodes=1,
            gpus=8,
            hbm_bytes=141_000_000_000,
            prefill_tokens_s=8000.0,
            decode_tokens_s=40.0,
            assumed=("prefill_tokens_s", "decode_tokens_s", "host_bytes_s", "store_bytes_s"),
        ),
        Machine(
            "h200-2x8",
            "h200-2x8",
            nodes=2,
            gpus=8,
            hbm_bytes=141_000_000_000,
            prefill_tokens_s=12000.0,
            decode_tokens_s=40.0,
            assumed=("prefill_tokens_s", "decode_tokens_s", "host_bytes_s", "store_bytes_s"),
        ),
    )
}
