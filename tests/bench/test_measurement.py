from dataclasses import replace

import pytest

from dflash_deploy.bench.measurement import LoadFigures, RequestResult, windows

STEP_S = 0.1


def answer(tokens, chunk_s, chunk_tokens, **more):
    return RequestResult(
        user=0,
        prompt_tokens=5,
        output_tokens=tokens,
        sent_s=0.0,
        ttft_s=chunk_s[0],
        decode_s=chunk_s[-1] - chunk_s[0],
        total_s=chunk_s[-1],
        text="word " * tokens,
        chunks=len(chunk_s),
        chunk_s=tuple(chunk_s),
        chunk_tokens=tuple(chunk_tokens),
        **more,
    )


STEPS_S = [STEP_S * (1 + step) for step in range(8)]
"""When eight steps of eight tokens each are over: eighty tokens a second."""


@pytest.mark.parametrize(
    ("chunk_s", "chunk_tokens"),
    [
        (STEPS_S, [8] * 8),
        # The same told token by token: in one packet, and in packets right after one another.
        ([at_s for at_s in STEPS_S for _ in range(8)], [1] * 64),
        ([at_s + place * 5e-5 for at_s in STEPS_S for place in range(8)], [1] * 64),
    ],
)
def test_steps_of_several_tokens_read_alike_however_they_are_told(chunk_s, chunk_tokens):
    one = answer(64, chunk_s, chunk_tokens)
    assert one.decode_tokens_per_s == pytest.approx(80, rel=1e-3)
    waits = LoadFigures.of([one]).inter_token_s
    assert waits is not None
    assert (waits.median, waits.p99) == pytest.approx((STEP_S / 8, STEP_S / 8), rel=1e-2)


def test_single_tokens_read_as_everywhere_else():
    assert answer(8, STEPS_S, [1] * 8).decode_tokens_per_s == pytest.approx(10)


def test_thoughts_that_are_not_shown_are_no_speed():
    one = answer(1008, STEPS_S, [1] * 8, hidden_tokens=1000)
    assert one.decode_tokens_per_s == pytest.approx(10)
    assert LoadFigures.of([one]).output_tokens == 1008, "they were made all the same"


@pytest.mark.parametrize("answer_s", [7.0, 17.0, 25.6, 45.0])
def test_a_steady_load_reads_steady_in_every_minute_however_long_its_answers(answer_s):
    step_s = answer_s / 64
    asked = (
        (user, answer_s * (user / 4 + number)) for user in range(4) for number in range(int(600 / answer_s))
    )
    results = [
        replace(answer(64, [step_s * (1 + n) for n in range(64)], [1] * 64), user=user, sent_s=sent_s)
        for user, sent_s in asked
    ]
    first, *minutes = [figures.total_tokens_per_s for _, _, figures in windows(results, 60.0)]
    assert len(minutes) >= 8
    # The users begin one after the other here, and none is done when a minute ends.
    assert minutes == pytest.approx([4 * 64 / answer_s] * len(minutes), rel=0.03)
    assert first < 4 * 64 / answer_s
    done = [one for one in results if one.sent_s + one.total_s < 50]
    assert len(list(windows(done, 60.0))) == 1, "a load of less than a minute is told"


def test_what_comes_out_of_a_buffer_tells_no_speed():
    at_once = answer(64, [2.0 + place * 1e-5 for place in range(64)], [1] * 64)
    # A call: its name, and half a millisecond later its arguments.
    call = answer(64, [2.0, 2.0005], [2, 62])
    for one in (at_once, call):
        assert one.decode_tokens_per_s is None
    figures = LoadFigures.of([at_once])
    assert figures.user_tokens_per_s is figures.inter_token_s is None
    assert figures.total_tokens_per_s == pytest.approx(64 / at_once.total_s)
    assert replace(at_once, error="cut").decode_tokens_per_s is None
