"""Training documents: what the model sees is K3's encoding of what was played."""

from itertools import groupby
from pathlib import Path
from random import Random

import numpy as np
import pytest

from model.encoding import conversation_segments, generation_segments
from model.small import SHIPPED
from model.tasks.lexicon import Split
from model.tasks.session import Session
from model.tokenizer import K3Tokenizer
from model.training import documents
from model.training.documents import WRITTEN, Document, Encoder, Kind


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    return K3Tokenizer.from_json(Path(SHIPPED, "tokenizer.json").read_text())


@pytest.mark.parametrize("seed", range(6))
def test_a_document_is_the_encoded_conversation(tokenizer: K3Tokenizer, seed: int) -> None:
    session = Session.draw(Random(seed), Split.TRAIN)
    document = Document(Encoder(tokenizer))
    schema = session.environment.schema()
    document.add_head(schema, "low")
    messages: list[dict[str, object]] = []
    for _, played in zip(range(12), session.messages(), strict=False):
        document.add_messages(played)
        messages += played
    segments = conversation_segments(messages, schema, thinking_effort="low", add_generation_prompt=False)
    assert document.ids == tokenizer.encode_segments(segments)


def test_what_is_written_follows_the_generation_prompt_and_ends_the_message(tokenizer: K3Tokenizer) -> None:
    document = documents.session_document(Random(5), Split.TRAIN, Encoder(tokenizer), 4000)
    prompt = tokenizer.encode_segments(generation_segments())
    at, runs = 0, 0
    for is_written, group in groupby(document.kinds, lambda kind: kind in WRITTEN):
        length = len(list(group))
        if is_written:
            assert document.ids[at - len(prompt) : at] == prompt
            assert document.ids[at + length - 1] == tokenizer.markup["<|end_of_msg|>"]
            runs += 1
        at += length
    assert runs > 20


def test_arguments_hold_values_and_calls_hold_names(tokenizer: K3Tokenizer) -> None:
    document = documents.session_document(Random(5), Split.TRAIN, Encoder(tokenizer), 4000)
    runs = [
        (Kind(kind), tokenizer.decode([id for _, id in group]))
        for kind, group in groupby(zip(document.kinds, document.ids, strict=True), lambda pair: pair[0])
    ]
    arguments = [text for kind, text in runs if kind is Kind.ARGUMENT]
    assert len(arguments) > 10
    assert all(text.count("<|close|>argument") == 1 and "key=" not in text for text in arguments)
    assert any('tool="' in text for kind, text in runs if kind is Kind.CALL)


def test_a_batch_depends_on_its_place_alone(tokenizer: K3Tokenizer) -> None:
    first = documents.batch(0, 3, 512, 1024, Encoder(tokenizer))
    again = documents.batch(0, 3, 512, 1024, Encoder(tokenizer))
    other = documents.batch(0, 4, 512, 1024, Encoder(tokenizer))
    assert first[0].shape == (2, 513)
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])
    assert not np.array_equal(first[0], other[0])
