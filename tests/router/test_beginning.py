"""What a stream begins with tells whether it is an answer, however it is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.bidir.router.turns import beginning
from vllm.bidir.router.turns.beginning import Beginning, Failed

from tests.router.fake_apis import messages_stream, responses_stream
from tests.router.fake_engine import event
from tests.router.test_no_answer import CANNOT_READ, WITHOUT_A_WORD

TOKEN = event({"choices": [{"text": "x", "finish_reason": None}]})
ABORTED = event({"choices": [{"text": "", "finish_reason": "abort"}]})
ANSWERS = [[TOKEN, ABORTED], responses_stream(1, None), messages_stream(None), [b": alive\n"]]
FAILURES = [
    (path, pieces) for said in (CANNOT_READ, WITHOUT_A_WORD) for path, pieces in said.items()
]
STREAMS = [("/v1/completions", pieces, False) for pieces in ANSWERS]
STREAMS += [(path, pieces, True) for path, pieces in [*FAILURES, ("/v1/completions", [ABORTED])]]


def fed(path: str, pieces: list[bytes]) -> tuple[Failed | None, bytes]:
    made = Beginning(path)
    for piece in [*(piece for piece in pieces if piece), b""]:
        if made.feed(piece):
            break
    return made.failed, made.data


@given(st.sampled_from(STREAMS), st.lists(st.integers(0, 400), max_size=12))
def test_any_cut_of_a_stream_tells_the_same(
    stream: tuple[str, list[bytes], bool], cuts: list[int]
) -> None:
    path, pieces, fails = stream
    whole = b"".join(pieces)
    ends = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    failed, data = fed(path, [whole[a:b] for a, b in itertools.pairwise(ends)])
    assert (failed is not None) == fails
    assert whole.startswith(data)


def test_a_failure_has_the_shape_of_its_api() -> None:
    for path, pieces in WITHOUT_A_WORD.items():
        failed, _ = fed(path, pieces)
        assert failed is not None and failed.status == 502 and failed.kind == "AbortedError"
        assert failed.body.startswith(b'{"type":"error"' if "messages" in path else b'{"error"')


def test_an_opening_without_end_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginning, "_MAX_OPENINGS", 1000)
    made = Beginning("/v1/responses")
    assert [made.feed(b"x" * 400) for _ in range(3)] == [False, False, True]
    assert made.failed is None and made.data == b"x" * 1200
