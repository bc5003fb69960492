from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.bench.sse import MAX_EVENT_BYTES, EventReader, TooLongError

payload = st.binary(max_size=60).filter(lambda b: b and b"\n" not in b and b"\r" not in b and b[:1] != b" ")


@given(
    events=st.lists(payload, max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_events_come_out_whole_however_the_bytes_are_cut(events, cuts, end, mark):
    lines = (line for e in events for line in (b": comment", b"event: x", b"data: " + e, b""))
    stream = mark + b"".join(line + end for line in lines)
    places = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    reader = EventReader()
    pieces = [stream[a:b] for a, b in pairwise(places)]
    assert [data for piece in pieces for data in reader.feed(piece)] == events


def test_the_first_event_may_follow_a_mark_and_no_event_waits_for_a_line_feed():
    reader = EventReader()
    assert [reader.feed(one) for one in (b"\xef\xbb\xbfdata: a\r\n\r", b"\ndata: b\r\r")] == [[b"a"], [b"b"]]
    assert reader.between_events


def test_data_of_several_lines_is_one_event():
    assert list(EventReader().feed(b"data: a\ndata:b\n\n")) == [b"a\nb"]


@pytest.mark.parametrize("line", [b"data: " + b"x" * 1000, b"data: " + b"y" * 1000 + b"\n"])
def test_what_never_ends_is_refused(line):
    reader = EventReader()
    with pytest.raises(TooLongError):
        for _ in range(2 * MAX_EVENT_BYTES // 1000):
            list(reader.feed(line))


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_any_bytes_are_survived(pieces):
    reader = EventReader()
    for piece in pieces:
        assert all(isinstance(data, bytes) for data in reader.feed(piece))
