from __future__ import annotations

from dflash_deploy.simulator.boot import Up
from dflash_deploy.simulator.prefix_cache import PrefixCache, prefixes
from dflash_deploy.simulator.scheduler import Job, Output, Scheduler
from dflash_deploy.simulator.virtual import run_virtual

from .conftest import FOUR_USERS, NVFP4


def up_of(flags: str) -> Up:
    up = run_virtual(flags.split(), []).up
    assert up is not None
    return up


def run_out(scheduler: Scheduler) -> list[Output]:
    outputs: list[Output] = []
    while (ends := scheduler.next_s) is not None:
        outputs += scheduler.advance(ends)
    return outputs


def test_every_token_comes_out_once_whatever_the_speed() -> None:
    scheduler = Scheduler(up_of(FOUR_USERS))
    jobs = [Job(prompt_tokens=30 + n, new_tokens=100 + 37 * n, fingerprint=n) for n in range(9)]
    for job in jobs:
        scheduler.submit(job, 0.0)
    outputs = run_out(scheduler)
    for job in jobs:
        own = [output for output in outputs if output.job is job]
        assert sum(output.tokens for output in own) == job.new_tokens == job.produced
        assert [output.finished for output in own] == [False] * (len(own) - 1) + [True]
        assert max(output.tokens for output in own) <= 8
        times = [output.at_s for output in own]
        assert times == sorted(times)
    assert scheduler.idle
    assert scheduler.used_tokens == 0


def test_never_more_run_than_may() -> None:
    scheduler = Scheduler(up_of(FOUR_USERS))
    for number in range(20):
        scheduler.submit(Job(prompt_tokens=20, new_tokens=60, fingerprint=number), 0.0)
    most = 0
    while (ends := scheduler.next_s) is not None:
        most = max(most, len(scheduler.running))
        scheduler.advance(ends)
    assert most == 4


def test_an_aborted_request_frees_its_place() -> None:
    scheduler = Scheduler(up_of(FOUR_USERS))
    jobs = [Job(prompt_tokens=20, new_tokens=4000, fingerprint=number) for number in range(4)]
    last = Job(prompt_tokens=20, new_tokens=10)
    for job in [*jobs, last]:
        scheduler.submit(job, 0.0)
    scheduler.advance(1.0)
    assert last.produced == 0
    for job in jobs:
        scheduler.abort(job)
    run_out(scheduler)
    assert last.finished_s is not None
    assert all(job.finished_s is None for job in jobs)
    assert scheduler.counters.aborted == 4
    assert scheduler.idle


def test_a_long_prompt_goes_through_in_chunks() -> None:
    lines: list[str] = []
    flags = f"{NVFP4} --mem-fraction-static 0.85 --max-running-requests 2 --chunked-prefill-size 2048"
    scheduler = Scheduler(up_of(flags), log=lines.append)
    scheduler.submit(Job(prompt_tokens=5000, new_tokens=2), 0.0)
    run_out(scheduler)
    tokens = [
        int(line.split("#new-token: ")[1].split(",")[0]) for line in lines if line.startswith("Prefill")
    ]
    assert tokens == [2048, 2048, 904]


def test_without_chunks_a_prompt_goes_through_whole() -> None:
    lines: list[str] = []
    flags = (
        f"{NVFP4} --mem-fraction-static 0.78 --max-running-requests 2 --chunked-prefill-size -1 "
        "--max-prefill-tokens 0 --cuda-graph-max-bs-prefill 512"
    )
    scheduler = Scheduler(up_of(flags), log=lines.append)
    scheduler.submit(Job(prompt_tokens=5000, new_tokens=2), 0.0)
    run_out(scheduler)
    assert ["#new-token: 5000" in line for line in lines if line.startswith("Prefill")] == [True]


def test_a_known_beginning_is_not_computed_again() -> None:
    flags = f"{NVFP4} --mem-fraction-static 0.85 --max-running-requests 1 --max-mamba-cache-size 40"
    prompt = "A sentence that many prompts begin with. " * 200
    times = []
    for radix in ("", " --disable-radix-cache"):
        scheduler = Scheduler(up_of(flags + radix))
        for start, end in ((0.0, "one"), (50.0, "two")):
            job = Job(prompt_tokens=2000, new_tokens=2, boundaries=prefixes(prompt + end, 2000, 256))
            scheduler.submit(job, start)
            run_out(scheduler)
        times.append((job.cached, (job.first_token_s or 0.0) - job.arrived_s))
    (cached, quick), (none, slow) = times
    assert cached > 1500
    assert none == 0
    assert quick < slow / 2


def test_the_prefix_cache_forgets_the_oldest() -> None:
    cache = PrefixCache(max_entries=None)
    first, second = prefixes("x" * 4000, 1000, 64), prefixes("y" * 4000, 1000, 64)
    cache.insert(first)
    cache.insert(second)
    held = cache.tokens
    cache.shrink(held // 2)
    assert cache.tokens <= held // 2
    assert cache.match(first) < cache.match(second)
    cache.clear()
    assert cache.match(second) == 0
