from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.engine.sglang.metrics import Metrics, parse

TEXT = """\
# HELP sglang:spec_accept_length The average acceptance length
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="/models/{odd}\\"x",tp_rank="0"} 4.65
sglang:spec_accept_rate{tp_rank="0"} 0.52
sglang:gen_throughput{dp_rank="0"} 225.25
sglang:gen_throughput{dp_rank="1"} 100.0
sglang:num_running_reqs 2.0
sglang:num_queue_reqs{a="b"} 1.0
sglang:token_usage{dp_rank="0"} 0.25
sglang:token_usage{dp_rank="1"} 0.5
sglang:mamba_usage 0.38
sglang:max_total_num_tokens 31000.0
sglang:generation_tokens_total{model_name="m"} 1.2345e+04
sglang:num_retracted_requests_total 0.0
sglang:startup_available_gpu_memory_gb 3.45
sglang:cached_tokens_total NaN
sglang:time_to_first_token_seconds_bucket{le="0.1"} 3.0
sglang:num_aborted_requests_total nonsense
process_cpu_seconds_total 12.0
"""


def test_the_figures_of_all_ranks_become_one() -> None:
    assert parse(TEXT) == Metrics(
        spec_accept_length=4.65,
        spec_accept_rate=0.52,
        gen_throughput_tokens_per_s=325.25,
        running_requests=2.0,
        queued_requests=1.0,
        token_usage=0.5,
        state_usage=0.38,
        kv_tokens=31000.0,
        generation_tokens_total=12345.0,
        retracted_requests_total=0.0,
        free_at_start_gib=3.45,
    )


def test_nothing_said_is_nothing_known() -> None:
    assert parse("") == Metrics()


def test_what_cannot_be_is_no_figure() -> None:
    assert (
        parse(
            "sglang:num_running_reqs 1e308\nsglang:num_queue_reqs -7\nsglang:token_usage 55\n"
            "sglang:gen_throughput 1.7e308\nsglang:gen_throughput 1.7e308\nsglang:gen_throughput +Inf\n"
        )
        == Metrics()
    )


PIECES = st.sampled_from(
    ["sglang:", "token_usage", "{", "}", '"', "\\", " ", "1.0", "\n", "1e999", "gen_throughput"]
)


@given(st.lists(PIECES | st.text(max_size=5), max_size=40).map("".join))
def test_any_text_is_read(text: str) -> None:
    parse(text)


def test_a_long_line_of_quotes_is_read_in_no_time() -> None:
    assert parse('sglang:token_usage{a="' + '\\"' * 2_000_000 + "\n" + TEXT).token_usage == 0.5
