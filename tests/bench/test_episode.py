from pathlib import Path

import pytest

from bench.episode import Player
from model import small
from model.tokenizer import K3Tokenizer


@pytest.mark.slow
def test_an_episode_is_one_conversation_cut_after_a_call(tmp_path: Path) -> None:
    model = small.build(tmp_path / "k3-small")
    episode = Player(model, 117).episode(1)
    assert episode.right_tasks == episode.tasks == 1
    ends = K3Tokenizer.load(model).eos_ids
    written: list[int] = []
    for turn in episode.turns:
        assert turn.prompt[: len(written)] == written, "a turn continues what was seen and written"
        written = turn.prompt + [step.token for step in turn.expected]
        assert written[-1] in ends
    before = [step.token for step in episode.turns[episode.cut - 1].expected]
    assert 'call tool="' in K3Tokenizer.load(model).decode(before)
