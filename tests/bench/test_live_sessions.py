import json

import pytest

from bench.live_sessions import main


def test_sessions_are_live_at_once_and_counted_to_the_token(capsys):
    arguments = ["--sessions", "12", "--turns", "3", "--context", "640", "--gap", "0.3", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sessions"], found["requests"], found["errors"]) == (12, 36, 0)
    assert found["largest_input_error"] == 0
    assert found["prompt_tokens"] == 12 * (640 + 672 + 704)
    # All at once: one after the other would take twelve times as long.
    assert found["wall_s"] == pytest.approx(0.9, abs=0.5)
    assert 0 <= found["scheduling_error_s"]["p50"] < 0.2
    with pytest.raises(SystemExit):
        main(["--turns", "1"])
