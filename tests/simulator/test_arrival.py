"""When requests arrive where time runs fast."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from .conftest import FOUR_USERS, Launcher, Simulated


def times(server: Simulated, number: int, **options: object) -> dict[str, float]:
    return server.events(f"Question {number}", **options)[-1]["simulated"]


def test_requests_sent_together_arrive_together(launch: Launcher) -> None:
    server = launch(FOUR_USERS, scale=500)
    grouped = replace(server, headers={"x-simulated-together": "first/3"})

    def late(number: int) -> dict[str, float]:
        time.sleep(0.1 * number)
        return times(grouped, number)

    with ThreadPoolExecutor(3) as pool:
        arrived = sorted(told["arrived_s"] for told in pool.map(late, range(3)))
    assert arrived[-1] - arrived[0] < 0.01


def test_one_that_leaves_does_not_come_back_with_the_rest(launch: Launcher) -> None:
    server = launch(FOUR_USERS, scale=500)
    grouped = replace(server, headers={"x-simulated-together": "first/2"})
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 8})
    gone = grouped.open("POST", "/v1/chat/completions", body)
    server.wait_for('"POST /v1/chat/completions HTTP/1.1" 200 OK')
    gone.close()
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda number: times(grouped, number), range(2)))
    assert all(one["finished_s"] > one["arrived_s"] for one in told)


def test_a_group_of_nonsense_is_no_group(launch: Launcher) -> None:
    server = launch(scale=500)
    for header in ("3", "/3", "a/", "a/x", "a/-1", "a/0", "a/1", "a/99999", "a/²"):
        odd = replace(server, headers={"x-simulated-together": header.encode("utf-8").decode("latin-1")})
        assert odd.chat(max_tokens=4)[0] == 200


def test_nothing_is_served_before_it_came(launch: Launcher) -> None:
    # At this speed the steps of others are always overdue when a request comes.
    server = launch(FOUR_USERS, scale=5000)
    told: list[dict[str, float]] = []

    def ask(user: int) -> None:
        told.extend(times(server, 100 * user + turn, max_tokens=300, ignore_eos=True) for turn in range(6))

    threads = [threading.Thread(target=ask, args=(user,)) for user in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 24
    assert all(one["arrived_s"] < one["first_token_s"] < one["finished_s"] for one in told)
