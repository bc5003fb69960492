import json

import pytest

from dflash_deploy.bench.results import LoadRows, Machine, Quality, UserRow
from dflash_deploy.compare.files import as_json, as_text, put_beside
from dflash_deploy.errors import DeployError

from .samples import result_of, round_of, run_of

MINE = result_of(run_of("none", [62.0, 62.2, 62.1]), run_of("dflash", [210.0, 211.0, 212.0]))


def test_runs_are_compared_by_their_names():
    yours = result_of(run_of("dflash", [200.0, 201.0, 202.0]), run_of("mtp", [130.0, 131.0, 132.0]))
    beside = put_beside(MINE, yours)
    (pair,) = beside.pairs
    assert (pair.name, pair.users, pair.rounds) == ("dflash", 1, 3)
    assert pair.speed.verdict == "faster"
    assert pair.speed.ratio == pytest.approx(1.05, abs=0.002)
    assert beside.warnings == ()


def test_two_files_of_one_run_each_are_compared_whatever_they_are_called():
    (pair,) = put_beside(result_of(run_of("a", [10.0] * 3)), result_of(run_of("b", [10.0] * 3))).pairs
    assert pair.name == "a against b"
    assert pair.speed.verdict == "indistinguishable"


def test_different_questions_are_not_compared_unless_one_insists():
    yours = result_of(run_of("dflash", [200.0, 201.0, 202.0]), sha256="1" * 64)
    with pytest.raises(DeployError, match="different things") as error:
        put_beside(MINE, yours)
    assert "--anyway" in error.value.fix
    beside = put_beside(MINE, yours, anyway=True)
    assert "different things" in beside.warnings[0]


def test_what_makes_a_comparison_doubtful_is_said():
    simulated = result_of(
        run_of("dflash", [200.0, 201.0], engine_version="0.5.19", outcome="unfit"), kind="simulated"
    )
    words = "; ".join(put_beside(MINE, simulated).warnings)
    for doubt in ("the second simulated", "0.5.19", "is unfit"):
        assert doubt in words


def test_of_rounds_of_unlike_number_those_are_compared_that_asked_the_same():
    # The later ones ask what one answers at another speed.
    yours = result_of(run_of("dflash", [200.0, 201.0, 202.0, *[300.0] * 5]))
    (pair,) = put_beside(MINE, yours).pairs
    assert pair.speed.verdict == "faster"
    assert (pair.rounds, pair.first, pair.second) == (3, 211.0, 201.0)


def test_a_ladder_is_compared_length_by_length():
    def ladder(lengths, faster=1.0, users=1, growing=0.0):
        loads = []
        for tokens in lengths:
            rows = [
                UserRow(
                    user=0,
                    prompt_tokens=tokens,
                    output_tokens=128,
                    ttft_s=0.1,
                    tokens_per_s=faster * 200_000 / tokens ** (1 - growing) + number,
                    wall_s=1.0,
                )
                for number in range(2)
            ]
            played = round_of(f"{tokens} tokens", 50.0).model_copy(update={"users": rows})
            label = f"{tokens} tokens"
            loads.append(LoadRows(users=users, label=label, rounds=[played], prompt_tokens=tokens))
        return result_of(run_of("bench", [1.0], loads=loads))

    # One has room for the short prompts alone, where any server is quicker, and counts a token less of some.
    long, short = ladder((1024, 2048, 4096, 8192, 16384, 32768), faster=1.1), ladder((1023, 2048, 4095))
    (pair,) = put_beside(long, short).pairs
    assert (pair.rounds, pair.speed.verdict) == (6, "faster")
    assert pair.speed.ratio == pytest.approx(1.1, abs=0.01)
    steeper = ladder((1024, 2048, 4096, 8192, 16384, 32768), growing=0.05)
    assert put_beside(steeper, long).warnings == (), "the longer, the more they differ"
    other = short.model_copy(update={"workload": long.workload.model_copy(update={"sha256": "1" * 64})})
    (pair,) = put_beside(long, other, anyway=True).pairs
    assert pair.first > pair.second, "of the lengths that both have"
    four = ladder((32768,), users=4).runs[0].loads
    (run,) = other.runs
    mixed = other.model_copy(update={"runs": [run.model_copy(update={"loads": [*run.loads, *four]})]})
    assert put_beside(long, mixed, anyway=True).pairs == (pair,), "with as many at once"
    with pytest.raises(DeployError, match="no load in common"):
        put_beside(ladder((1024,)), ladder((2048,)))


def test_launches_are_compared_where_both_have_some():
    def launched(*starts):
        return result_of(
            *(run_of("x", [start, start + 0.1, start + 0.2], repeat=n) for n, start in enumerate(starts, 1))
        )

    # Three starts of one server, of which one differs by more than rounds of one start do.
    beside = put_beside(launched(100.0, 101.5, 100.9), launched(100.0, 100.0, 100.2))
    assert (beside.pairs[0].rounds, beside.pairs[0].launches) == (9, 3)
    assert beside.pairs[0].speed.verdict == "indistinguishable"
    assert "two starts" not in as_text(beside)
    assert "two starts" in as_text(put_beside(launched(100.0), launched(101.0)))


def test_rounds_that_hang_together_are_told():
    steady = result_of(run_of("x", [100.0] * 24))
    noisy = result_of(run_of("x", [100.0 + (7 * number) % 5 for number in range(24)]))
    # Eight slow rounds in a row, as of a card that was hot for a while.
    slowed = result_of(run_of("x", [100.0 - 3 * (8 <= number < 16) + number % 3 for number in range(24)]))
    assert put_beside(noisy, steady).warnings == put_beside(steady, steady).warnings == ()
    (warning,) = put_beside(slowed, steady).warnings
    assert warning.startswith("x, one user: ")
    assert warning.endswith("too narrow")


def test_figures_of_another_release_are_told():
    other = MINE.model_copy(update={"tool_version": "0.2"})
    assert put_beside(MINE, other).warnings == ("different releases of this tool: 0.1 and 0.2",)


@pytest.mark.parametrize(("users", "label"), [(1, "1 user"), (0, "2 requests/s")])
def test_a_long_load_of_one_user_is_compared_request_by_request(users, label):
    def load_of(speeds):
        requests = [
            UserRow(
                user=0 if users else number,
                prompt_tokens=9,
                output_tokens=128,
                ttft_s=0.1,
                tokens_per_s=speed,
                wall_s=1.0,
            )
            for number, speed in speeds
        ]
        # Those of an open loop stand as they ended.
        rows = requests if users else requests[::-1]
        played = round_of(label, 50.0).model_copy(update={"users": rows})
        return result_of(run_of("bench", [1.0], loads=[LoadRows(users=users, label=label, rounds=[played])]))

    # Prompts differ by far more than the two servers do.
    slow = [(number, 50.0 + 20 * number) for number in range(12)]
    (pair,) = put_beside(load_of([(n, speed * 1.03) for n, speed in slow]), load_of(slow)).pairs
    assert (pair.users, pair.rounds, pair.speed.verdict) == (users, 12, "faster")
    assert pair.speed.ratio == pytest.approx(1.03)
    assert (pair.first, pair.second) == (pytest.approx(160 * 1.03), 160)


def test_texts_are_compared_by_their_digests():
    def with_texts(*digests):
        answers = {f"p{number}": digest for number, digest in enumerate(digests)}
        return result_of(run_of("x", [1.0, 1.0], quality=Quality(digests={"alone": answers})))

    (pair,) = put_beside(with_texts("aa", "bb", "cc"), with_texts("aa", "zz")).pairs
    assert (pair.same_text, pair.compared_text) == (1, 2)
    (pair,) = put_beside(MINE, result_of(run_of("dflash", [1.0]))).pairs
    assert pair.same_text is None


def test_files_without_a_common_load():
    with pytest.raises(
        DeployError, match=r"no load in common: none \(1 user\), dflash \(1 user\) in the first"
    ):
        put_beside(MINE, result_of(run_of("mtp", [1.0])))
    four, one = (result_of(run_of("x", [1.0], users=users)) for users in (4, 1))
    with pytest.raises(DeployError, match=r"x \(4 users\) in the first, x \(1 user\) in the second"):
        put_beside(four, one)


def test_what_else_may_have_made_the_difference_is_said():
    def told(machine=None, **more):
        mine = result_of(
            run_of("x", [1.0, 1.0], model="/models/qwen"), machine=Machine(gpu="A", driver="580")
        )
        yours = result_of(run_of("x", [1.0, 1.0], **more), machine=machine)
        return put_beside(mine, yours).warnings

    assert told(model="qwen", flags={"mem-fraction-static": 0.9}) == ()
    assert told(model="<name>/llama") == ("different models: qwen and llama",)
    assert told(Machine(gpu="A", driver="590")) == ("different drivers: 580 and 590",)
    assert told(flags={"mem-fraction-static": 0.8, "host": "<address>"}) == (
        "x: other flags: mem-fraction-static",
    )
    one = UserRow(
        user=0, prompt_tokens=9, output_tokens=200, ttft_s=0.1, tokens_per_s=9.0, wall_s=9.0, estimated=True
    )
    short = LoadRows(users=1, rounds=[round_of("1", 1.0).model_copy(update={"users": [one]})])
    assert told(loads=[short]) == (
        "x: answers of 1024 tokens in the first, of 200 in the second",
        "tokens of the second are chunks of the stream: the true figures are these or higher",
    )


@pytest.mark.parametrize("speed", [1e30, 1e-20])
def test_any_figures_that_a_file_may_hold_compare(speed):
    beside = put_beside(result_of(run_of("x", [speed] * 3)), result_of(run_of("x", [100.0] * 3)))
    assert as_text(beside)
    json.loads(as_json(beside), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_file_that_was_cut_short_is_told():
    whole = result_of(run_of("x", [100.0] * 3))
    assert (
        "the second was cut short"
        in put_beside(whole, whole.model_copy(update={"interrupted": True})).warnings
    )


def test_ten_thousand_rounds_compare_before_one_gives_up():
    runs = [
        run_of("x", [100.0 + place % 3 for place in range(1000)], repeat=repeat) for repeat in range(1, 11)
    ]
    (pair,) = put_beside(result_of(*runs), result_of(*runs)).pairs
    assert (pair.rounds, pair.speed.verdict) == (10_000, "indistinguishable")
