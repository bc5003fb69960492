from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile import load, render
from dflash_deploy.profile.load import list_profiles, load_profile, resolve
from dflash_deploy.profile.schema import Choices, Profile, Range
from dflash_deploy.resources import resource_dir
from dflash_deploy.yaml_file import InvalidDocument
from tests.profile.conftest import MINIMAL, ProfileWriter

SHIPPED = sorted(path.stem for path in (resource_dir("profiles") / "services").glob("*.yaml"))


def _mistakes(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(InvalidDocument) as caught:
        load_profile(str(path), overrides=overrides)
    return [str(problem).replace(str(path), "f") for problem in caught.value.problems]


class TestShipped:
    def test_all_that_were_promised_are_there(self) -> None:
        assert {
            "rtx5090-single-user",
            "rtx5090-four-users",
            "rtx5090-long-context",
            "rtx4090-single-user",
            "rtx3090-single-user",
            "pro6000",
            "dgx-spark",
            "h200",
            "sglang-cpu-smoke",
        } <= set(SHIPPED)

    @pytest.mark.parametrize("name", SHIPPED)
    def test_loads(self, name: str) -> None:
        profile = load_profile(name)
        assert profile.engine.version == "0.5.23"
        assert profile.known

    @pytest.mark.parametrize("name", SHIPPED)
    def test_reads_the_same_with_plain_pyyaml(self, name: str) -> None:
        path = load.find(name)
        assert Profile.model_validate(yaml.safe_load(path.read_text())) == load_profile(name)

    def test_the_hand_tuned_settings_of_the_write_up_are_the_mark_to_beat(self) -> None:
        single, four = load_profile("rtx5090-single-user"), load_profile("rtx5090-four-users")
        assert single.known[0].flags["mem-fraction-static"] == 0.85
        assert single.known[0].flags["cuda-graph-bs-decode"] == [1]
        assert four.known[0].flags["max-total-tokens"] == 8192
        assert four.known[0].flags["disable-radix-cache"] is True


class TestLayers:
    def test_an_own_profile_replaces_a_shipped_one(self, write: ProfileWriter) -> None:
        path = write(MINIMAL, "h200", own=True)
        resolved = resolve("h200")
        assert resolved.files == (path,)
        assert resolved.profile.summary == "smallest profile"

    def test_an_own_profile_may_be_laid_over_the_shipped_one_of_its_name(self, write: ProfileWriter) -> None:
        path = write("extends: h200\nworkload: {users: 20}\nsummary: mine\n", "h200", own=True)
        resolved = resolve("h200")
        assert [file.name for file in resolved.files] == ["h200.yaml", "h200.yaml"]
        assert resolved.files[0] == path
        assert resolved.profile.workload.users == 20
        assert resolved.profile.workload.context_tokens == 16384
        assert resolved.profile.summary == "mine"

    def test_a_given_file_extends_an_own_one_that_extends_a_shipped_one(self, write: ProfileWriter) -> None:
        write("extends: rtx5090-four-users\nservice: {port: 31000}\n", "home", own=True)
        path = write("extends: home\nservice: {user: llm}\n")
        profile = load_profile(str(path))
        assert (profile.service.port, profile.service.user) == (31000, "llm")
        assert profile.service.name == "qwen3-8-27b"

    def test_null_takes_a_key_out(self, write: ProfileWriter) -> None:
        path = write("extends: h200\ncard: null\nsearch: {kv-cache-dtype: null}\n")
        profile = load_profile(str(path))
        assert profile.card is None
        assert "kv-cache-dtype" not in profile.search

    def test_choices_and_ranges_replace_each_other(self, write: ProfileWriter) -> None:
        path = write(
            "extends: rtx5090-single-user\n"
            "search:\n"
            "  mem-fraction-static: {choices: [0.85, 0.9]}\n"
            "  chunked-prefill-size: {low: 1024, high: 4096, step: 1024}\n"
            "  speculative-num-draft-tokens: {low: 6}\n"
        )
        search = load_profile(str(path)).search
        assert search["mem-fraction-static"] == Choices(choices=[0.85, 0.9])
        assert search["chunked-prefill-size"] == Range(low=1024, high=4096, step=1024)
        assert search["speculative-num-draft-tokens"] == Range(low=6, high=16, step=1)

    def test_lists_are_replaced_whole(self, write: ProfileWriter) -> None:
        path = write("extends: rtx5090-single-user\nknown: [{name: x, source: y, flags: {}}]\n")
        assert [known.name for known in load_profile(str(path)).known] == ["x"]

    def test_a_flag_fixed_above_is_no_longer_searched(self, write: ProfileWriter) -> None:
        path = write("extends: rtx5090-single-user\nflags: {kv-cache-dtype: bfloat16}\n")
        profile = load_profile(str(path))
        assert profile.flags["kv-cache-dtype"] == "bfloat16"
        assert "kv-cache-dtype" not in profile.search
        assert profile.known == [], "the hand-tuned setting has another type, so it is ruled out"

    def test_a_flag_searched_above_is_no_longer_fixed(self, write: ProfileWriter) -> None:
        path = write("extends: h200\nsearch: {mamba-radix-cache-strategy: {choices: [no_buffer, auto]}}\n")
        profile = load_profile(str(path))
        assert "mamba-radix-cache-strategy" not in profile.flags

    def test_a_circle_is_told(self, write: ProfileWriter) -> None:
        write("extends: b\n", "a", own=True)
        write("extends: a\n", "b", own=True)
        with pytest.raises(InvalidDocument, match="goes in a circle \\(a -> b -> a\\)"):
            load_profile("a")

    def test_a_profile_that_extends_itself_and_nothing_below(self, write: ProfileWriter) -> None:
        path = write("extends: only\n", "only", own=True)
        with pytest.raises(InvalidDocument, match="circle"):
            load_profile(str(path))

    @pytest.mark.parametrize(
        ("below", "said"),
        [("h20", "did you mean 'h200'"), ("../h200", "no profile"), ("[a]", "found a list")],
    )
    def test_extends_of_something_that_is_not_there(
        self, write: ProfileWriter, below: str, said: str
    ) -> None:
        (mistake,) = _mistakes(write(f"summary: x\nextends: {below}\n"))
        assert mistake.startswith("f:2:1: extends: ")
        assert said in mistake

    def test_a_mistake_is_told_with_the_file_that_it_stands_in(self, write: ProfileWriter) -> None:
        own = write("extends: h200\nworkload: {users: many}\n", "home", own=True)
        path = write("extends: home\nservice: {prot: 1}\n")
        with pytest.raises(InvalidDocument) as caught:
            load_profile(str(path))
        places = {problem.key: str(problem.origin) for problem in caught.value.problems}
        assert places == {("workload", "users"): f"{own}:2:12", ("service", "prot"): f"{path}:2:11"}


class TestOverrides:
    def test_values_of_every_kind(self) -> None:
        profile = load_profile(
            "rtx5090-single-user",
            overrides=[
                "flags.mem-fraction-static=0.9",
                "search.max-running-requests.low=1",
                "search.cuda-graph-bs-decode.choices=[[1], [1, 2, 3]]",
                "workload.tasks={code: 1}",
                "service.user=llm",
                "env.CUDA_VISIBLE_DEVICES='0'",
                "model.path=/models/x=y",
                "search.chunked-prefill-size=",
                "summary='a: b'",
            ],
        )
        assert profile.flags["mem-fraction-static"] == 0.9
        assert profile.search["max-running-requests"] == Range(low=1, high=2, step=1)
        assert profile.search["cuda-graph-bs-decode"] == Choices(choices=[[1], [1, 2, 3]])
        assert profile.workload.tasks == {"code": 1.0}
        assert profile.env == {"CUDA_VISIBLE_DEVICES": "0"}
        assert profile.model.path == "/models/x=y"
        assert "chunked-prefill-size" not in profile.search
        assert profile.summary == "a: b"

    def test_folders_are_kept_from_the_root_so_that_a_service_finds_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", "/home/someone")
        overrides = ["model.path=./tiny", "speculation.draft_path=~/draft"]
        profile = load_profile("rtx5090-single-user", overrides=overrides)
        assert profile.model.path == str(tmp_path / "tiny")
        assert profile.speculation.draft_path == "/home/someone/draft"
        assert load_profile("h200", overrides=["model.path=Qwen/Other"]).model.path == "Qwen/Other"

    def test_the_last_one_counts(self) -> None:
        profile = load_profile("h200", overrides=["service.port=1024", "service.port=1025"])
        assert profile.service.port == 1025

    def test_a_wrong_value_names_its_option(self) -> None:
        with pytest.raises(InvalidDocument) as caught:
            load_profile("h200", overrides=["workload.users=lots", "service.prot=1"])
        assert [str(problem) for problem in caught.value.problems] == [
            "--set service.prot: service.prot: unknown key; did you mean 'port'?",
            "--set workload.users: workload.users: expected a whole number, found 'lots'",
        ]

    @pytest.mark.parametrize("setting", ["nothing", "=3", "a..b=3", " a=3", "." * 100 + "=1", "\x1b[31m=1"])
    def test_settings_of_the_wrong_form(self, setting: str) -> None:
        with pytest.raises(DeployError) as caught:
            load_profile("h200", overrides=[setting])
        assert caught.value.exit_code == ExitCode.USAGE

    def test_what_is_wrong_on_the_command_line_is_not_to_be_mended_in_the_file(self) -> None:
        with pytest.raises(InvalidDocument) as caught:
            load_profile("h200", overrides=["workload.users=lots"])
        assert caught.value.fix == "correct what is given with --set"

    @pytest.mark.parametrize(
        ("setting", "said"),
        [("workload.uesrs=null", "; did you mean 'users'?"), ("nothing=", "no such key to take out")],
    )
    def test_a_key_that_is_not_there_cannot_be_taken_out(self, setting: str, said: str) -> None:
        with pytest.raises(InvalidDocument) as caught:
            load_profile("h200", overrides=[setting])
        assert said in caught.value.message

    def test_a_number_that_is_text_to_yaml_is_said_to_be(self) -> None:
        with pytest.raises(InvalidDocument, match=r"found '1e3'; write it without quotes, as 20000"):
            load_profile("h200", overrides=["workload.output_tokens=1e3"])

    def test_a_value_that_is_not_yaml(self) -> None:
        with pytest.raises(InvalidDocument, match=r"--set workload\.users: not YAML"):
            load_profile("h200", overrides=["workload.users=[1, 2"])

    def test_a_known_setting_that_more_users_rule_out_is_left_out(self) -> None:
        overrides = ["workload.users=2", "search.max-running-requests.low=2"]
        assert load_profile("rtx5090-single-user", overrides=overrides).known == []


class TestEnvironment:
    @pytest.mark.parametrize(
        ("typed", "value"),
        [
            ("1", "1"),
            ("007", "007"),
            ("1.50", "1.50"),
            ("true", "true"),
            ("'1'", "1"),
            ("a b", "a b"),
            ("1e3", "1e3"),
        ],
    )
    def test_a_variable_needs_no_quotes(self, typed: str, value: str) -> None:
        profile = load_profile("rtx5090-single-user", overrides=[f"env.OMP_NUM_THREADS={typed}"])
        assert profile.env == {"OMP_NUM_THREADS": value}

    def test_nor_in_a_file(self, write: ProfileWriter) -> None:
        path = write("extends: rtx5090-single-user\nenv: {A: 1, B: 0.5, C: true, D: 'x'}\n")
        assert load_profile(str(path)).env == {"A": "1", "B": "0.5", "C": "true", "D": "x"}

    @pytest.mark.parametrize(
        "name",
        ["HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "SECRET", "MYSQL_PWD"],
    )
    def test_a_secret_is_refused_and_not_repeated(self, name: str) -> None:
        with pytest.raises(DeployError) as caught:
            load_profile("rtx5090-single-user", overrides=[f"env.{name}=hf_abcdefghij"])
        assert "a secret may not stand here" in caught.value.message
        assert "EnvironmentFile=" in caught.value.message
        assert "hf_abc" not in caught.value.message
        assert ("hf auth login" in caught.value.message) == (name == "HF_TOKEN")

    @pytest.mark.parametrize("name", ["HF_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "SGLANG_MAX_TOKENS", "KEYS"])
    def test_names_that_only_look_like_it(self, name: str) -> None:
        assert load_profile("rtx5090-single-user", overrides=[f"env.{name}=/x"]).env == {name: "/x"}


class TestVariablesAndMethodsThatAreSearched:
    def test_a_variable_is_text_whatever_it_looks_like(self, write: ProfileWriter) -> None:
        path = write(
            "extends: rtx5090-single-user\n"
            "search: {env.OMP_NUM_THREADS: {choices: [null, 1, true, 'x y']}}\n"
            "known: [{name: a, source: b, flags: {env.OMP_NUM_THREADS: 1}}]\n"
        )
        profile = load_profile(str(path))
        assert profile.search["env.OMP_NUM_THREADS"] == Choices(choices=[None, "1", "true", "x y"])
        assert profile.known[0].flags == {"env.OMP_NUM_THREADS": "1"}

    def test_both_are_given_on_the_command_line(self) -> None:
        profile = load_profile(
            "rtx5090-single-user",
            overrides=[
                "search.env.SGLANG_X_Y={choices: [null, 1]}",
                "search.method.choices=[dflash, mtp, none]",
            ],
        )
        assert profile.search["env.SGLANG_X_Y"] == Choices(choices=[None, "1"])
        assert profile.search["method"] == Choices(choices=["dflash", "mtp", "none"])
        gone = load_profile("rtx5090-single-user", overrides=["search.env.A.choices=[x]", "search.env.A="])
        assert "env.A" not in gone.search

    def test_what_is_fixed_above_is_no_longer_searched(self, write: ProfileWriter) -> None:
        write(
            "extends: rtx5090-single-user\n"
            "search: {env.A: {choices: [x, z]}, method: {choices: [dflash, dspark]}}\n",
            "mine",
            own=True,
        )
        over = "speculation: {method: dspark, draft: qwen3.8-27b-dspark}\nenv: {A: x}\n"
        profile = load_profile(str(write(f"extends: mine\n{over}known: []\n")))
        assert profile.env == {"A": "x"}
        assert not {"env.A", "method"} & profile.search.keys()
        back = load_profile("mine", overrides=["env.A=x", "search.env.A.choices=[x, y]"])
        assert back.env == {}

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ("search: {env.A: {low: 1, high: 4, step: 1}}", "f:2:10: search.env.A: a variable is text"),
            (
                "search: {env.A: {choices: [[a, b]]}}",
                "search.env.A.choices[0]: a variable is text of one line",
            ),
            ("search: {env.A-B: {choices: [a]}}", "or env.NAME for a variable of the server's environment"),
            ("search: {env.HF_TOKEN: {choices: [hf_abcdef]}}", "search.env.HF_TOKEN: a secret may not stand"),
            ("search: {env.CUDA_VISIBLE_DEVICES: {choices: ['0', '1']}}", "the card is chosen with --gpu"),
            ("search: {env.CUDA_DEVICE_ORDER: {choices: [null]}}", "the card is chosen with --gpu"),
            ("env: {A: x}\nsearch: {env.A: {choices: [x]}}", "env.A: both fixed here and searched"),
            (
                "env: {A: x}\nknown: [{name: a, source: b, flags: {env.A: y}}]",
                "known[0].flags.env.A: env fixes env.A to another value, 'x'",
            ),
            ("known: [{name: a, source: b, flags: {env.A_KEY: sk-1}}]", "known[0].flags.env.A_KEY: a secret"),
            (
                "search: {env.A: {choices: [x]}}\nknown: [{name: a, source: b, flags: {env.A: y}}]",
                "is none of the choices of search.env.A",
            ),
            ("flags: {method: mtp}", "flags.method: is set by speculation.method"),
            (
                "search: {method: {choices: [none, eagle9]}}",
                "choices[1]: there is no method 'eagle9'; expected",
            ),
            (
                "search: {method: {choices: [none, dflsh]}}",
                "there is no method 'dflsh'; did you mean 'dflash'?",
            ),
            (
                "search: {method: {choices: [none, null]}}",
                "choices[1]: write none for decoding without drafts",
            ),
            ("search: {method: {low: 1, high: 2, step: 1}}", "search.method: methods are no numbers"),
            (
                "search: {method: {choices: [mtp]}}",
                "the profile's own method, none, is not among the choices",
            ),
            (
                "model: {target: a/b}\nsearch: {method: {choices: [none, dspark]}}",
                "choices[1]: no dspark draft is known for a/b: name one in speculation.drafts.dspark",
            ),
            (
                "search: {method: {choices: [none, ngram]}, speculative-num-steps: {choices: [2, 3]}}",
                "search.speculative-num-steps: no method that is tried reads it: none, ngram",
            ),
            (
                "known: [{name: a, source: b, flags: {method: ngram}}]",
                "known[0].flags.method: no methods are searched",
            ),
            (
                "speculation: {method: none, drafts: {dspark: qwen3.8-27b-dflash2}}",
                "speculation.drafts.dspark: qwen3.8-27b-dflash2 is a dflash draft",
            ),
            (
                "speculation: {method: dspark, draft: a/b, drafts: {dspark: c/d}}",
                "speculation.drafts.dspark: dspark is this profile's own method",
            ),
        ],
    )
    def test_each_mistake_is_told(self, write: ProfileWriter, change: str, expected: str) -> None:
        changed = {line.partition(":")[0] for line in change.splitlines()}
        content = yaml.safe_load(MINIMAL)
        kept = yaml.safe_dump({key: value for key, value in content.items() if key not in changed})
        if expected.startswith("f:2"):
            kept, change = "", f"summary: x\n{change}"
        assert expected in "\n".join(_mistakes(write(kept + change)))

    def test_a_draft_that_is_named_makes_a_method_possible(self, write: ProfileWriter) -> None:
        content = yaml.safe_load(MINIMAL)
        content |= {
            "model": {"target": "a/b"},
            "speculation": {"method": "none", "drafts": {"dspark": "c/d"}},
            "search": {"method": {"choices": ["none", "dspark"]}},
        }
        profile = load_profile(str(write(yaml.safe_dump(content))))
        assert profile.speculation.drafts == {"dspark": "c/d"}

    def test_back_ends_are_checked_by_version(self) -> None:
        choices = [
            "search.fp8-gemm-backend={choices: [auto, cutlass]}",
            "search.fp4-gemm-backend={choices: [auto, marlin]}",
            "search.speculative-draft-kv-cache-dtype={choices: [null, bfloat16]}",
            "search.speculative-draft-attention-backend={choices: [null, triton]}",
        ]
        assert len(load_profile("rtx5090-single-user", overrides=choices).search) > 14
        with pytest.raises(InvalidDocument) as caught:
            load_profile("rtx5090-single-user", overrides=[*choices, "engine.version=0.5.17"])
        assert "--speculative-draft-kv-cache-dtype came with SGLang 0.5.18; 0.5.17 lacks it" in str(
            caught.value
        )
        with pytest.raises(InvalidDocument, match=r"fp4-gemm-backend.*cutlass"):
            load_profile(
                "rtx5090-single-user", overrides=["search.fp4-gemm-backend={choices: [auto, cutlass]}"]
            )

    def test_the_example_of_the_documentation_is_right(self, write: ProfileWriter) -> None:
        page = (Path(__file__).parents[2] / "docs" / "search.md").read_text()
        (example,) = re.findall(
            r"```yaml\n(# ~/.config/dflash-deploy/profiles/wide.yaml\n.*?)```", page, re.DOTALL
        )
        profile = load_profile(str(write(example, "wide", own=True)))
        assert profile.search["method"] == Choices(choices=["dflash", "dspark", "mtp", "none"])
        assert [known.name for known in profile.known] == ["hand-tuned"]


class TestMistakes:
    def test_all_at_once_with_place_key_and_nearest(self, write: ProfileWriter) -> None:
        path = write(
            "summry: x\n"
            "card: rtx-509\n"
            "model: {target: qwen3.8-27b-nvfp5}\n"
            "engine: {version: 0.5}\n"
            "workload: {users: '2', context_tokens: true, output_tokens: 8, task: {}}\n"
            "objective: {optimize: latency, constraints: {ttft_p95_s: {}}}\n"
            "flags: {kv-cache-dtyp: x, api-key: secret, --page-size: 1, page-size: abc}\n"
            "search: {max-running-requests: {low: 4, high: 1, step: 1}}\n"
            "env: {A-B: x, C: [1]}\n"
            "service: {name: Has Space, port: 0, host: 0.0.0.0}\n"
        )
        told = "\n".join(_mistakes(path))
        for expected in (
            "f:1:1: summary: this key is required and missing",
            "f:1:1: summry: unknown key; did you mean 'summary'?",
            "f:2:1: card: unknown card 'rtx-509'; did you mean 'rtx-5090'?",
            "f:3:9: model.target: unknown model 'qwen3.8-27b-nvfp5'; did you mean 'qwen3.8-27b-nvfp4'?",
            "f:4:10: engine.version: expected text (put it in quotes",
            "f:5:12: workload.users: expected a whole number, found '2'",
            "f:5:24: workload.context_tokens: expected a whole number, found true",
            "f:5:64: workload.task: unknown key; did you mean 'tasks'?",
            "f:6:13: objective.optimize: expected one of total_tokens_per_s, user_tokens_per_s, latency_s, "
            "context_tokens, found 'latency'; did you mean 'latency_s'?",
            "f:6:46: objective.constraints.ttft_p95_s: give min, max or both",
            "f:7:44: flags.--page-size: expected a flag's full name without dashes",
            "f:8:10: search.max-running-requests: low is above high",
            "f:9:7: env.A-B: expected the name of an environment variable, found 'A-B'",
            "f:9:15: env.C: expected text",
            "f:10:11: service.name: expected lower-case letters, digits and dashes, found 'Has Space'",
            "f:10:28: service.port: expected a number greater than or equal to 1, found 0",
        ):
            assert expected in told

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ("flags: {kv-cache-dtyp: x}", "flags.kv-cache-dtyp: --kv-cache-dtyp is no flag of SGLang 0.5.23"),
            ("flags: {page-size: abc}", "flags.page-size: --page-size: 'abc' is not a whole number"),
            ("flags: {kv-cache-dtype: fp7}", "flags.kv-cache-dtype: --kv-cache-dtype"),
            ("flags: {api-key: x}", "flags.api-key: is set by service.api_key_file"),
            ("flags: {port: 1}", "flags.port: is set by service.port"),
            ("flags: {mem-fraction-static: 0.7}", "both fixed here and searched"),
            ("flags: {max-total-tokens: 512}", "holds less than the 1024 tokens"),
            ("flags: {context-length: 512}", "is below workload.context_tokens, 1024"),
            ("flags: {speculative-num-draft-tokens: 8}", "means nothing with speculation.method none"),
            ("flags: {served: [1, a]}", "flags.served: expected true, false, a number"),
            ("search: {page-siz: {low: 1, high: 2, step: 1}}", "search.page-siz: --page-siz is no flag"),
            ("search: {page-size: {choices: [1, x]}}", "search.page-size.choices[1]: --page-size: 'x'"),
            ("known: [{name: a, source: b, flags: {page-sise: 1}}]", "known[0].flags.page-sise: --page-sise"),
            (
                "known: [{name: a, source: b, flags: {mem-fraction-static: 0.95}}]",
                "known[0].flags.mem-fraction-static: is outside search.mem-fraction-static, 0.5 to 0.9",
            ),
            (
                "flags: {max-running-requests: 1}\n"
                "workload: {users: 2, context_tokens: 64, output_tokens: 2}",
                "flags.max-running-requests: serves fewer than the 2 users",
            ),
            ("speculation: {method: dflash}", "speculation: method dflash needs a draft"),
            (
                "speculation: {method: ngram, draft: a/b}",
                "speculation.draft: method ngram has no draft model",
            ),
            (
                "speculation: {method: dspark, draft: qwen3.8-27b-dflash2}",
                "qwen3.8-27b-dflash2 is a dflash draft, method dspark needs another",
            ),
            (
                "speculation: {method: dflash, draft: qwen3.8-27b-dflsh2}",
                "did you mean 'qwen3.8-27b-dflash2'",
            ),
            (
                "model: {target: tiny-random}\nspeculation: {method: dflash, draft: qwen3.8-27b-dflash2}",
                "not for tiny-random",
            ),
            ("model: {target: qwen3.8-27b-dflash2}", "qwen3.8-27b-dflash2 is a draft, not a target"),
            (
                "model: {target: tiny-random}\nworkload: {users: 1, context_tokens: 5000, output_tokens: 8}",
                "tiny-random reads at most 4096 tokens",
            ),
            ("service: {name: x, host: 0.0.0.0}", "service.host: others can reach 0.0.0.0"),
            ("service: {name: x, host: '::'}", "service.host: others can reach ::"),
            ("service: {name: x, api_key_file: key.yaml}", "expected a path from the root"),
            ("service: {name: x, api_key_file: ~nobody-here/key}", "no such home folder"),
            ("engine: {version: 0.5.23, name: vllm}", "engine.name: expected one of sglang, found 'vllm'"),
            ('env: {A: "x\\ny"}', "env.A: expected text of one line"),
        ],
    )
    def test_each_is_told(self, write: ProfileWriter, change: str, expected: str) -> None:
        changed = {line.partition(":")[0] for line in change.splitlines()}
        content = yaml.safe_load(MINIMAL)
        kept = yaml.safe_dump({key: value for key, value in content.items() if key not in changed})
        assert expected in "\n".join(_mistakes(write(kept + change)))

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
    def test_a_host_of_this_machine_alone_needs_no_key(self, host: str) -> None:
        assert load_profile("h200", overrides=[f"service.host='{host}'"]).service.host == host

    def test_a_host_for_others_with_a_key(self) -> None:
        overrides = ["service.host=0.0.0.0", "service.api_key_file=/etc/dflash/key.yaml"]
        assert load_profile("h200", overrides=overrides).service.api_key_file == Path("/etc/dflash/key.yaml")

    @pytest.mark.parametrize("content", ["", "just text", "- a\n- b", "42"])
    def test_a_file_that_is_no_profile_at_all(self, write: ProfileWriter, content: str) -> None:
        (mistake,) = _mistakes(write(content))
        assert "expected keys with values, found" in mistake

    def test_a_missing_profile_names_the_nearest(self) -> None:
        with pytest.raises(DeployError, match="did you mean 'rtx5090-four-users'") as caught:
            load_profile("rtx5090-for-users")
        assert caught.value.exit_code == ExitCode.MISSING

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(DeployError, match="no such file") as caught:
            load_profile(str(tmp_path / "none.yaml"))
        assert caught.value.exit_code == ExitCode.MISSING


class TestListing:
    def test_hidden_and_broken_ones_are_listed(self, write: ProfileWriter) -> None:
        own = write(MINIMAL, "h200", own=True)
        write("summary: [", "broken", own=True)
        entries = {(entry.name, entry.layer): entry for entry in list_profiles()}
        assert entries["h200", "user"].shadowed_by is None
        assert entries["h200", "shipped"].shadowed_by == own
        assert entries["broken", "user"].problem is not None
        assert entries["pro6000", "shipped"].summary.startswith("Qwen3.8 27B")


class TestWriting:
    @pytest.mark.parametrize("name", SHIPPED)
    def test_what_is_shown_loads_to_the_same(self, name: str, write: ProfileWriter) -> None:
        profile = load_profile(name)
        assert load_profile(str(write(render.as_yaml(profile)))) == profile
        started = render.starting_file(profile, name="mine", origin=name)
        assert load_profile(str(write(started))) == profile

    @settings(
        max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    )
    @given(
        text=st.text(min_size=1, max_size=30),
        number=st.floats(0.01, 1e6, allow_nan=False),
        values=st.lists(st.text(max_size=8), min_size=1, max_size=4),
    )
    def test_any_values_survive(
        self, write: ProfileWriter, text: str, number: float, values: list[str]
    ) -> None:
        content = yaml.safe_load(MINIMAL)
        content["env"] = {"A": text}
        content["objective"]["constraints"] = {"latency_s": {"max": number}}
        content["model"]["served_name"] = text
        content["known"] = [{"name": text, "source": value or "-", "flags": {}} for value in values]
        try:
            profile = Profile.model_validate(content)
        except ValueError:
            return
        assert load_profile(str(write(render.as_yaml(profile)))) == profile


_MUTATIONS = st.sampled_from(
    [b"", b"null", b"---\n", b"\xff", b"1e400", b".nan", b"<<: ", b"true", b"-1", b"9" * 30]
) | (st.binary(min_size=1, max_size=3))
_KEYS = st.sampled_from(
    ["workload.users", "search", "search.x.low", "flags", "known", "service.host", "extends", "card", "env.A"]
)
_WRITTEN = st.sampled_from(
    ["", "1", "null", "[]", "{}", "{a: 1}", "[{}]", "'\0'", "x y", "../..", "*a", "1e9"]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(name=st.sampled_from(SHIPPED), data=st.data())
def test_a_mutated_profile_is_right_or_wrong_and_never_a_crash(
    write: ProfileWriter, name: str, data: st.DataObject
) -> None:
    content = load.find(name).read_bytes()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        cut = data.draw(st.integers(0, 40))
        content = content[:at] + data.draw(_MUTATIONS) + content[at + cut :]
    path = write(content)
    try:
        load_profile(str(path))
    except DeployError as error:
        assert error.exit_code == ExitCode.INVALID_INPUT
        assert error.message


@settings(max_examples=150)
@given(st.lists(st.text(max_size=20) | st.builds("{}={}".format, _KEYS, _WRITTEN), min_size=1, max_size=3))
def test_any_settings_are_taken_or_refused_in_words(overrides: list[str]) -> None:
    try:
        load_profile("h200", overrides=overrides)
    except DeployError as error:
        assert error.exit_code in (ExitCode.INVALID_INPUT, ExitCode.USAGE)
