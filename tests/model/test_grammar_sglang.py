import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
xgrammar = pytest.importorskip("xgrammar")

from sglang.srt.constrained import base_grammar_backend  # noqa: E402

from model import grammar  # noqa: E402

pytestmark = pytest.mark.sglang

VOCABULARY = ["r", "c", "<open>", "<close>", "<sep>", "<end>"]


def token(text: str) -> dict[str, Any]:
    return {"type": "token", "token": text}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


SHAPES = (
    [token("<open>"), text("r"), token("<sep>")],
    [token("<sep>"), text("r"), token("<open>")],
    [text("r"), token("<open>")],
    [text("r"), token("<sep>"), token("<close>"), text("c"), token("<sep>")],
)


def admitted(compiler: Any, shape: list[dict[str, Any]]) -> list[set[str]]:
    """What may stand at each place, for shapes that leave no choice."""
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": shape}}
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
    places: list[set[str]] = []
    for element in shape:
        mask = xgrammar.allocate_token_bitmask(1, len(VOCABULARY))
        matcher.fill_next_token_bitmask(mask)
        places.append({name for id, name in enumerate(VOCABULARY) if int(mask[0, 0]) >> id & 1})
        assert matcher.accept_token(VOCABULARY.index(element.get("token") or element["value"]))
    return places


def test_the_backend_is_sglangs_own_but_for_the_compilers_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base_grammar_backend, "GRAMMAR_BACKEND_REGISTRY", {})
    grammar.register()
    assert set(base_grammar_backend.GRAMMAR_BACKEND_REGISTRY) == {"xgrammar"}


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(range(len(SHAPES)), 2)))
def test_without_its_cache_the_compiler_keeps_tokens_apart(first: int, second: int):
    info = xgrammar.TokenizerInfo(
        VOCABULARY, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(VOCABULARY), stop_token_ids=[5]
    )
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
    for shape in (SHAPES[first], SHAPES[second]):
        assert admitted(compiler, shape) == [{part.get("token") or part["value"]} for part in shape]
