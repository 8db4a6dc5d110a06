import itertools

import pytest

from bench.state_dtype import Change, Reply, sessions


def test_changes_are_taken_as_far_as_answers_are_equal():
    mine = [Reply([1, 2, 3], [-1.0, -2.0, -3.0], 0), Reply([1, 2, 3], [-1.0, -1.0, -1.0], 0)]
    theirs = [Reply([1, 2, 3], [-1.0, -2.5, -3.0], 0), Reply([1, 9, 3], [-1.25, -9.0, -9.0], 0)]
    found = Change.between(mine, theirs).to_json()
    assert (found["answers"], found["diverged"], found["first_divergence_median"]) == (2, 1, 1)
    assert found["tokens_compared"] == 4
    assert found["logprob_change_mean"] == pytest.approx(0.75 / 4, abs=1e-3)
    assert found["logprob_change_max"] == 0.5
    same = Change.between(mine, mine).to_json()
    assert (same["diverged"], same["first_divergence_median"], same["logprob_change_max"]) == (0, None, 0)


def test_each_turn_goes_on_where_the_last_stopped():
    talks = sessions(2, 3)
    assert [len(prompt) for prompt in talks[0]] == [500, 700, 900]
    assert all(
        later[: len(earlier)] == earlier for talk in talks for earlier, later in itertools.pairwise(talk)
    )
    assert talks[0][0] != talks[1][0]
    assert sessions(2, 2, range(1400)) == [
        [list(range(500)), list(range(700))],
        [list(range(700, 1200)), list(range(700, 1400))],
    ]
