"""The tiny checkpoint's tokenizer for transformers (`trust_remote_code`): K3's chat encoding over BPE.

It is copied into the checkpoint beside `encoding.py` and `tokenizer.py`, which it imports relatively, so that
the directory loads anywhere. SGLang calls `apply_chat_template(messages, tokenize=True,
add_generation_prompt=True, tools=..., return_dict=False, **kwargs)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerFast

from .encoding import conversation_segments
from .tokenizer import K3Tokenizer


class K3TokenizerFast(PreTrainedTokenizerFast):
    """A fast tokenizer whose chat template is K3's encoder."""

    @cached_property
    def _k3(self) -> K3Tokenizer:
        return K3Tokenizer.from_json(self.backend_tokenizer.to_str())

    def apply_chat_template(  # pyright: ignore[reportIncompatibleMethodOverride] -- K3's own options
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = True,
        thinking: bool = True,
        thinking_effort: str | None = None,
        tool_choice: object = None,
        response_format: Mapping[str, Any] | None = None,
        image_prompts: Sequence[str] | None = None,
        **_: Any,
    ) -> str | list[int] | BatchEncoding:
        """Render one conversation: text, ids, or ids with an attention mask (`return_dict`).

        Takes the options of `conversation_segments`; others, which transformers and engines pass to every
        template, are ignored. Raises `EncodingError`.
        """
        segments = conversation_segments(
            conversation,
            tools,
            thinking=thinking,
            thinking_effort=thinking_effort,
            tool_choice=tool_choice,
            response_format=response_format,
            image_prompts=image_prompts,
            add_generation_prompt=add_generation_prompt,
        )
        if not tokenize:
            return "".join(text for text, _ in segments)
        ids = self._k3.encode_segments(segments)
        return BatchEncoding({"input_ids": ids, "attention_mask": [1] * len(ids)}) if return_dict else ids
