import pytest

from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.server_side import ServerFigures, Standing, between, standing
from dflash_deploy.engine.sglang import metrics

BEFORE = """
sglang:generation_tokens_total{model="m"} 1000.0
sglang:spec_verify_calls_total{model="m"} 400.0
sglang:queue_time_seconds_sum{model="m"} 2.0
sglang:queue_time_seconds_count{model="m"} 10.0
"""
AFTER = """
sglang:generation_tokens_total{model="m"} 1600.0
sglang:spec_verify_calls_total{model="m"} 550.0
sglang:queue_time_seconds_sum{model="m"} 5.0
sglang:queue_time_seconds_count{model="m"} 16.0
sglang:spec_accept_rate{model="m"} 0.5
sglang:num_aborted_requests_total{model="m"} 1.0
"""


def test_counters_tell_of_this_load_alone():
    figures = between(Standing(metrics.parse(BEFORE), 2.5), Standing(metrics.parse(AFTER), 2.9))
    assert figures.accept_length == 600 / 150
    assert not figures.accept_length_since_start
    assert (figures.accept_rate, figures.queue_s) == (0.5, 0.5)
    assert (figures.generated_tokens, figures.aborted, figures.retracted) == (600, 1, None)


def test_without_metrics_the_average_since_the_start_is_marked():
    figures = between(Standing(None, 2.5), Standing(None, 2.9))
    assert figures == ServerFigures(accept_length=2.9, accept_length_since_start=True)
    assert between(Standing(None, None), Standing(None, None)) is None


def test_a_server_that_began_anew_between_is_not_believed():
    figures = between(Standing(metrics.parse(AFTER), None), Standing(metrics.parse(BEFORE), None))
    assert (figures.generated_tokens, figures.queue_s) == (None, None)


def test_another_engine_is_not_asked():
    assert standing(Endpoint("http://127.0.0.1:1")) == Standing(None, None)


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), 1e300])
def test_counters_that_count_nothing_are_passed_over(nonsense):
    names = ("verify_calls_total", "generation_tokens_total", "queued_total", "queue_s_total")
    wrong = metrics.Metrics(**dict.fromkeys(names, nonsense), retracted_requests_total=nonsense)
    assert between(Standing(metrics.Metrics(), None), Standing(wrong, None)) == ServerFigures()
    assert between(Standing(wrong, None), Standing(metrics.Metrics(), None)) == ServerFigures()
