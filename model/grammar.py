"""SGLang's grammar backend for xgrammar, with a compiler that keeps nothing from one grammar for the next.

xgrammar's compiler shares token masks between the rules of different grammars, and takes rules for alike that
differ in the tokens they name: a tag for a tool call then forbids what it should force (seen with 0.2.7;
SGLang says so in `constrained/xgrammar_backend.py` and compiles its own framed grammars without the cache).
SGLang keeps whole compiled grammars itself, so all that is lost is time for grammars that are new.

It takes the place of `xgrammar` through SGLang's own registry, which it asks before its built-in backends.
"""

from collections.abc import Iterable
from typing import Any


def register() -> None:
    """Put the backend in place of SGLang's."""
    from sglang.srt.constrained.base_grammar_backend import register_grammar_backend

    register_grammar_backend("xgrammar", _backend)


def _backend(
    _server_args: object, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int] | None
) -> Any:
    """What `create_grammar_backend` builds for `xgrammar` (SGLang 0.5.23), but for the compiler's cache."""
    from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from sglang.srt.parser.reasoning_parser import ReasoningParser
    from sglang.srt.runtime_context import get_serving
    from xgrammar import GrammarCompiler

    serving: Any = get_serving()
    backend: Any = XGrammarGrammarBackend(
        tokenizer,
        vocab_size=vocab_size,
        model_eos_token_ids=list(eos_token_ids) if eos_token_ids else None,
        any_whitespace=not serving.constrained_json_disable_any_whitespace,
        max_whitespace_cnt=serving.constrained_json_max_whitespace_cnt,
    )
    info = backend._tokenizer_info  # a private name, but the compiler does not give it back
    backend.grammar_compiler = GrammarCompiler(tokenizer_info=info, cache_enabled=False)
    if not serving.reasoning_parser:
        return backend
    parser = ReasoningParser(model_type=serving.reasoning_parser, stream_reasoning=False, tokenizer=tokenizer)
    return ReasonerGrammarBackend(
        backend, parser, tokenizer, enable_strict_thinking=serving.enable_strict_thinking
    )
