from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.tune.launching import values, variables
from dflash_deploy.tune.space import key_of, space_of, tidy

from .samples import profile

SEARCH = {
    "mem-fraction-static": {"low": 0.8, "high": 0.95, "step": 0.01},
    "max-running-requests": {"low": 1, "high": 9, "step": 2},
    "max-total-tokens": {"choices": [None, 8192, 16384]},
    "disable-radix-cache": {"choices": [True, False]},
    "cuda-graph-bs-decode": {"choices": [[1], [1, 2, 4]]},
}
SPACE = space_of(profile(search=SEARCH, flags={"log-level": "info"}))


def test_ranges_have_every_step_and_both_ends():
    values = {dimension.flag: dimension.values for dimension in SPACE.dimensions}
    assert values["max-running-requests"] == (1, 3, 5, 7, 9)
    assert values["mem-fraction-static"][0] == 0.8
    assert values["mem-fraction-static"][-1] == 0.95
    assert len(values["mem-fraction-static"]) == 16
    assert 0.86 in values["mem-fraction-static"]
    assert SPACE.size == 16 * 5 * 3 * 2 * 2


@given(st.data())
def test_a_configuration_is_found_again_in_the_space(data):
    places = {
        dimension.flag: data.draw(st.integers(0, len(dimension.values) - 1)) for dimension in SPACE.dimensions
    }
    settings = SPACE.settings(places)
    assert settings["log-level"] == "info"
    again = SPACE.settings(SPACE.places(settings) | {"cuda-graph-bs-decode": places["cuda-graph-bs-decode"]})
    assert key_of(again) == key_of(settings)


def test_the_grid_holds_every_configuration_once():
    space = space_of(profile(search={"a-b": {"choices": [None, 1, 2]}, "c": {"choices": [True, False]}}))
    assert len({key_of(space.settings(places)) for places in space.grid()}) == space.size == 6


def test_null_leaves_the_flag_out_and_a_switch_that_is_off_too():
    assert "max-total-tokens" not in SPACE.settings(dict.fromkeys(SEARCH, 0))
    assert "disable-radix-cache" not in SPACE.settings(dict.fromkeys(SEARCH, 1))


def test_graphs_for_more_requests_than_can_run_are_dropped():
    assert tidy({"cuda-graph-bs-decode": [1, 2, 4], "max-running-requests": 3}) == {
        "cuda-graph-bs-decode": [1, 2],
        "max-running-requests": 3,
    }
    assert tidy({"cuda-graph-bs-decode": [4], "max-running-requests": 3})["cuda-graph-bs-decode"] == [4]


def test_equal_configurations_have_one_key_and_different_ones_have_two():
    assert key_of({"a": 1, "b": False}) == key_of({"a": 1})
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert key_of({"a": 1}) != key_of({"a": True})


def test_a_value_that_is_no_choice_has_no_place():
    assert "max-total-tokens" not in SPACE.places({"max-total-tokens": 9000})
    assert SPACE.places({})["max-total-tokens"] == 0
    assert SPACE.places({})["disable-radix-cache"] == 1


METHODS = space_of(
    profile(
        model={"target": "qwen3.8-27b-nvfp4"},
        speculation={"method": "dflash", "draft": "qwen3.8-27b-dflash2"},
        search={
            "method": {"choices": ["dflash", "dspark", "mtp", "ngram", "none"]},
            "speculative-num-draft-tokens": {"low": 2, "high": 9, "step": 1},
            "speculative-draft-window-size": {"choices": [None, 4096]},
            "chunked-prefill-size": {"choices": [None, 1024]},
            "env.OMP_NUM_THREADS": {"choices": [None, "2"]},
        },
    )
)


def test_what_a_method_does_not_read_tells_no_two_configurations_apart():
    by_method = {}
    for places in METHODS.grid():
        settings = METHODS.settings(places)
        by_method.setdefault(settings["method"], set()).add(key_of(settings))
    others = 2 * 2
    assert {method: len(keys) // others for method, keys in by_method.items()} == {
        "dflash": 8 * 2,
        "dspark": 1,
        "mtp": 8 * 2,
        "ngram": 8,
        "none": 1,
    }


def test_a_method_brings_its_flags_and_the_engine_gets_what_follows_from_it():
    mtp = METHODS.whole({"method": "mtp", "speculative-num-draft-tokens": 6, "env.OMP_NUM_THREADS": "2"})
    assert values(mtp) == {
        "speculative-algorithm": "NEXTN",
        "speculative-num-steps": 5,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 6,
    }
    assert variables(mtp) == {"OMP_NUM_THREADS": "2"}
    assert values(METHODS.whole({"method": "none", "speculative-num-draft-tokens": 6})) == {}
    dspark = values(METHODS.whole({"method": "dspark", "speculative-num-draft-tokens": 6}))
    assert dspark == {
        "speculative-algorithm": "DSPARK",
        "speculative-draft-model-path": "RadixArk/Qwen3.8-27B-DSpark",
    }


def test_a_setting_that_names_no_method_has_the_profiles_own():
    assert METHODS.whole({})["method"] == "dflash"
    assert METHODS.places(METHODS.whole({}))["method"] == 0


def test_equal_settings_of_mtp_are_equal_however_they_are_said():
    key = key_of({"method": "mtp"})
    assert key == key_of({"method": "mtp", "speculative-num-draft-tokens": 4})
    assert key == key_of({"method": "mtp", "speculative-num-steps": 3, "speculative-eagle-topk": 1})
    assert key != key_of({"method": "mtp", "speculative-num-steps": 2})
    tree = {"method": "mtp", "speculative-num-steps": 3, "speculative-eagle-topk": 4}
    assert key_of({**tree, "speculative-num-draft-tokens": 8}) != key_of(
        {**tree, "speculative-num-draft-tokens": 16}
    )
