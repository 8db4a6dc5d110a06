"""Exact turns: every prompt continues from the tokens that the model saw and sampled before."""

from dataclasses import dataclass

from cache_store.ledger import Ledger
from model.tokenizer import K3Tokenizer
from service.channels import Channel
from service.conversation import Completion, Conversation


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids to generate from, and how they came about.

    turn: key under which the completion will be recorded, known before anything is generated.
    channel: where the generation prompt left off, for `ChannelParser`.
    parent: key of the turn that is continued, or None; `continued_tokens` of `ids` come from it.
    restored_reasoning: assistant messages whose reasoning the client dropped and the ledger gave back.
    restored_ids: tool calls whose ids the client had rewritten.
    fallback: why the ledger had no say (`ledger_unavailable`), or None.
    divergence: which message differs first from what is recorded, and how; None when nothing does.
    """

    ids: list[int]
    turn: str
    channel: Channel
    parent: str | None
    continued_tokens: int
    restored_reasoning: int
    restored_ids: int
    fallback: str | None
    divergence: str | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The outcome of recording a turn; `stored` is False when the ledger did not acknowledge it."""

    turn: str
    stored: bool


class Turns:
    """Prepares prompts from the ledger's turns and records completions into it."""

    def __init__(self, ledger: Ledger, tokenizer: K3Tokenizer, *, keep_tails: bool = True) -> None:
        raise NotImplementedError

    async def prepare(self, tenant: str, session: str | None, conversation: Conversation) -> Prompt:
        """The prompt for the conversation's next message. Never fails for a fault of the ledger.

        Raises `ValueError` naming the field when a message cannot be encoded.
        """
        raise NotImplementedError

    async def record(self, prompt: Prompt, completion: Completion) -> Recorded:
        """Store the turn; Redis has acknowledged it when this returns with `stored`."""
        raise NotImplementedError
