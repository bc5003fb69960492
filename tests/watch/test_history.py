from __future__ import annotations

import json
import sqlite3
import time
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.paths import state_dir
from dflash_deploy.watch import history
from dflash_deploy.watch.history import Sample, keep, read, series, sparkline
from tests.tool import run_tool

from .engine_server import HEALTHY, serving

NOW_S = 1_800_000_000.0


def test_what_was_kept_is_read_again_in_order_and_one_a_minute(tmp_path: Path):
    file = tmp_path / "a %?#b" / "qwen.sqlite"
    for second in (0, 30, 90, 150):
        keep(file, Sample(NOW_S + second, tokens_per_s=float(second)))
    assert [sample.tokens_per_s for sample in read(file, since_s=NOW_S)] == [30.0, 90.0, 150.0]
    assert [sample.tokens_per_s for sample in read(file, since_s=NOW_S + 100)] == [150.0]
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_file_grows_no_further_than_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(history, "_SLOTS", 20)
    file = tmp_path / "qwen.sqlite"
    for minute in range(20):
        keep(file, Sample(NOW_S + 60 * minute, tokens_per_s=1.0, kv_usage=0.5))
    full = file.stat().st_size
    for minute in range(20, 70):
        keep(file, Sample(NOW_S + 60 * minute, tokens_per_s=2.0, kv_usage=0.5))
    assert file.stat().st_size == full
    assert len(read(file, since_s=0)) == 20
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("harm", [b"", b"no database", b"SQLite format 3\0" + b"\xff" * 4000, b"\0" * 8192])
def test_a_damaged_file_is_begun_anew(tmp_path: Path, harm: bytes):
    file = tmp_path / "qwen.sqlite"
    file.write_bytes(harm)
    assert read(file, since_s=0) == ()
    keep(file, Sample(NOW_S, tokens_per_s=7.0))
    assert [sample.tokens_per_s for sample in read(file, since_s=0)] == [7.0]


def test_a_file_of_another_shape_and_values_that_are_none_do_no_harm(tmp_path: Path):
    file = tmp_path / "qwen.sqlite"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE sample (slot INTEGER PRIMARY KEY, at_s)")
    assert read(file, since_s=0) == ()
    keep(file, Sample(NOW_S))
    assert [sample.at_s for sample in read(file, since_s=0)] == [NOW_S], "an older version's is begun anew"
    other = tmp_path / "other.sqlite"
    keep(other, Sample(NOW_S, tokens_per_s=1.0))
    with sqlite3.connect(other) as database:
        database.execute("UPDATE sample SET kv_usage = 'x', accept_length = 9e999")
    assert read(other, since_s=0) == ()


def test_whoever_cannot_write_leaves_it(tmp_path: Path):
    file = tmp_path / "qwen.sqlite"
    keep(file, Sample(NOW_S, tokens_per_s=1.0))
    with sqlite3.connect(file, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        keep(file, Sample(NOW_S + 60, tokens_per_s=2.0))
        other.execute("COMMIT")
    assert len(read(file, since_s=0)) == 1
    keep(Path("/proc/no/such/place.sqlite"), Sample(NOW_S))
    keep(file, Sample(float("nan")))
    assert len(read(file, since_s=0)) == 1


@given(
    st.lists(
        st.builds(
            Sample,
            st.floats(NOW_S - 90_000, NOW_S + 90_000),
            *[st.none() | st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)]
            * 4,
        ),
        max_size=30,
    )
)
def test_any_samples_become_lines_of_the_same_length(samples: list[Sample]):
    for one in series(samples, now_s=NOW_S, hours=6, spans=36):
        assert len(one.values) == len(sparkline(one.values)) == 36
        assert any(value is not None for value in one.values)


def test_a_line_goes_from_zero_to_the_largest():
    assert sparkline([0.0, 1.0, None, 4.0, 8.0]) == "▁▂·▅█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    samples = [Sample(NOW_S - 60, tokens_per_s=10.0), Sample(NOW_S - 120, tokens_per_s=20.0)]
    (one,) = series(samples, now_s=NOW_S, hours=6, spans=36)
    assert one.values[-1] == 15.0
    assert one.values[:-1] == (None,) * 35


def test_status_shows_the_last_hours_and_a_watch_keeps_them():
    with serving(HEALTHY) as engine:
        command = ("status", "--url", engine.url)
        assert run_tool(*command, "--watch", "--every", "0.5", "--times", "1").returncode == 0
        (file,) = (state_dir() / "history").iterdir()
        assert len(read(file, since_s=0)) == 1
        assert file.stat().st_mode & 0o777 == 0o600
        for minutes in range(1, 200):
            keep(file, Sample(time.time() - 60 * minutes, tokens_per_s=float(minutes % 50), kv_usage=0.5))
        done = run_tool(*command)
        as_json = run_tool(*command, "--json")
    (line,) = [line for line in done.stdout.splitlines() if "tokens/s" in line and "last 6 h" in line]
    assert "▅" in line
    assert "·" in line
    assert line.endswith("(measured)")
    assert max(map(len, done.stdout.splitlines())) <= 80
    (server,) = json.loads(as_json.stdout)["servers"]
    assert {one["name"] for one in server["history"]} >= {"tokens_per_s", "kv_usage"}
    assert all(len(one["values"]) == 36 and one["span_s"] == 600 for one in server["history"])


def test_a_damaged_history_does_not_keep_status_from_its_work():
    with serving(HEALTHY) as engine:
        key = sha256(engine.url.encode()).hexdigest()[:24]
        file = state_dir() / "history" / f"{key}.sqlite"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"SQLite format 3\0 and nothing else")
        watch = ("--watch", "--every", "0.5", "--times", "2")
        done = run_tool("status", "--url", engine.url, *watch)
    assert (done.returncode, done.stderr) == (0, "")
    # One a minute: two where the minute ended between the looks.
    assert 1 <= len(read(file, since_s=0)) <= 2


def test_figures_that_were_simulated_stay_so_whoever_looks_at_them_later():
    samples = [Sample(NOW_S - 60, tokens_per_s=10.0, simulated=1.0), Sample(NOW_S - 9000, kv_usage=0.5)]
    found = series(samples, now_s=NOW_S, hours=6, spans=36)
    assert {one.name: one.simulated for one in found} == {"tokens_per_s": True, "kv_usage": False}
