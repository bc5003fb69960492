from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_deploy.files import write_atomic
from dflash_deploy.serving_env import environments, records
from dflash_deploy.serving_env.patches import ledger
from dflash_deploy.serving_env.patches.tree import find_tree
from dflash_deploy.serving_env.pins import pin_of_source
from dflash_deploy.serving_env.records import EnvironmentRecord
from tests.serving_env.command import run

from .trees import DFLASH, FP8, METHOD, install, snapshot

HEAD = "nvfp4-lm-head"
BMM = "bmm-fp8-backend"


def patch(*words: str) -> subprocess.CompletedProcess[str]:
    return run("patch", *words)


@pytest.fixture
def env(tmp_path: Path) -> str:
    return str(install(tmp_path / "site-packages"))


def test_list_says_what_each_is_for() -> None:
    done = patch("list")
    assert done.returncode == 0
    assert f"{HEAD}: " in done.stdout
    assert "\x1b" not in done.stdout
    found = json.loads(patch("list", "--json").stdout)
    assert [one["name"] for one in found["patches"]] == [BMM, HEAD]
    assert found["patches"][0]["parameters"]["backend"]["choices"] == ["cublas", "cudnn", "cutlass", "auto"]


def test_list_tells_how_each_stands_where_an_environment_is_named(env: str) -> None:
    assert "here: " not in patch("list").stdout
    assert patch("apply", HEAD, "--env", env).returncode == 0
    done = patch("list", "--env", env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"SGLang 0.5.18 in {env}\n")
    assert "  here: to be measured: " in done.stdout
    assert "  here: applied: applied by this tool on " in done.stdout
    found = json.loads(patch("list", "--env", env, "--json").stdout)
    assert found["environment"]["version"] == "0.5.18"
    assert {one["name"]: one["verdict"] for one in found["patches"]} == {BMM: "unmeasured", HEAD: "applied"}
    assert "environment" not in json.loads(patch("list", "--json").stdout)
    assert patch("list", "--env", "/no/such/place").returncode == 4


def test_diff_shows_nothing_that_the_patch_did_not_do(env: str) -> None:
    assert patch("apply", HEAD, "--env", env).returncode == 0
    with (Path(env) / DFLASH).open("a") as file:
        file.write("# mine\n")
    done = patch("diff", "--env", env)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"{HEAD} does not stand any more" in done.stderr
    assert json.loads(patch("diff", "--env", env, "--json").stdout)["patches"] == [
        {"name": HEAD, "diff": None}
    ]


def test_an_edited_file_is_put_back_when_said_so(env: str) -> None:
    """As the message of the check says, word for word; and a dry run refuses what the run would refuse."""
    before = snapshot(Path(env))
    assert patch("apply", HEAD, "--env", env).returncode == 0
    with (Path(env) / DFLASH).open("a") as file:
        file.write("# mine\n")
    for words in ([], ["--dry-run"]):
        refused = patch("revert", HEAD, "--env", env, *words)
        assert refused.returncode == 5
        assert "--force" in refused.stderr
    fix = json.loads(patch("check", HEAD, "--env", env, "--json").stdout)["patches"][0]["fix"]
    done = patch(*shlex.split(fix.partition(" (")[0])[2:])
    assert done.returncode == 0, done.stderr
    kept = Path(env) / f"{DFLASH}.edited"
    assert str(kept) in done.stdout
    assert kept.read_text().endswith("# mine\n")
    kept.unlink()
    assert snapshot(Path(env)) == before


def test_check_gives_verdicts_with_evidence(env: str) -> None:
    done = patch("check", "--env", env, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["environment"]["version"] == "0.5.18"
    assert {one["name"]: one["verdict"] for one in found["patches"]} == {BMM: "unmeasured", HEAD: "needed"}
    assert all(one["evidence"] for one in found["patches"])
    known = {one["name"]: [advice["id"] for advice in one["advice"]] for one in found["patches"]}
    assert known[HEAD] == [
        "release-without-dflash2",
        "quantised-head-refused",
        "quantised-head-tensor-parallel",
        "padded-vocabulary",
    ]
    text = patch("check", HEAD, "--env", env)
    assert text.returncode == 1
    assert "i a quantised head gives scores for a vocabulary padded" in text.stdout
    assert f"fix: dflash-deploy patch apply {HEAD} --env {env}" in text.stdout


def test_a_fix_can_be_pasted_whatever_the_folder_is_called(tmp_path: Path) -> None:
    env = str(install(tmp_path / "vé nv; touch gone" / "site-packages"))
    fix = json.loads(patch("check", HEAD, "--env", env, "--json").stdout)["patches"][0]["fix"]
    words = shlex.split(fix)
    assert words[words.index("--env") + 1] == env
    assert patch(*words[2:]).returncode == 0
    assert patch("revert", HEAD, "--env", env).returncode == 0


def test_check_is_content_where_nothing_is_to_be_done(tmp_path: Path) -> None:
    install(tmp_path, files={DFLASH: "class DFlashDraftModel:\n    pass\n"})
    assert patch("check", "--env", str(tmp_path)).returncode == 0


def test_apply_shows_applies_and_reverts(env: str) -> None:
    before = snapshot(Path(env))
    dry = patch("apply", "--env", env, "--dry-run")
    assert dry.returncode == 0
    assert f"+++ b/{DFLASH}" in dry.stdout
    assert snapshot(Path(env)) == before

    done = patch("apply", "--env", env)
    assert done.returncode == 0, done.stderr
    assert f"{HEAD}: applied" in done.stdout
    assert f"{BMM}: to be measured" in done.stdout
    assert patch("diff", "--env", env).stdout.startswith(f"--- a/{DFLASH}")

    undone = patch("revert", "--env", env, "--json")
    assert undone.returncode == 0
    assert [one["name"] for one in json.loads(undone.stdout)["reverted"]] == [HEAD]
    assert snapshot(Path(env)) == before
    assert patch("revert", "--env", env).stdout == f"No patch is applied in {env}.\n"


def test_a_back_end_is_taken_by_hand_only_when_said_so(env: str) -> None:
    refused = patch("apply", BMM, "--env", env, "--set", "backend=cudnn")
    assert refused.returncode == 4
    assert "to measure with" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert patch("apply", BMM, "--env", env, "--unmeasured").returncode == 2
    done = patch("apply", BMM, "--env", env, "--set", "backend=cudnn", "--unmeasured", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["patches"][0]
    assert found["verdict"] == "applied"
    assert found["changed"] is True
    assert "+            backend=_DFLASH_DEPLOY_BMM_FP8_BACKEND," in found["diff"]
    for value, status, said in (
        ("nonsense", 2, "expected one of"),
        ("cutlass", 1, f"revert {BMM} --env {env}"),
    ):
        other = patch("apply", BMM, "--env", env, "--set", f"backend={value}", "--unmeasured")
        assert other.returncode == status
        assert said in other.stderr


def probe_record(folder: Path, outcome: str) -> Path:
    call = {"m": 8, "k": 1, "n": 1, "first_s": 0.1, "steady_s": 1e-5, "relative_error": 0.0, "correct": True}
    backends = [
        {"backend": "cublas", "outcome": outcome, "message": None, "calls": [call]},
        {"backend": "cudnn", "outcome": "works", "calls": [call]},
    ]
    path = folder / "probe.json"
    path.write_text(
        json.dumps({"schema_version": 1, "measured": True, "device": "a card", "backends": backends})
    )
    return path


def test_a_measurement_decides_and_is_kept(env: str, tmp_path: Path) -> None:
    works = probe_record(tmp_path, "works")
    refused = patch("apply", BMM, "--env", env, "--probe", str(works))
    assert refused.returncode == 1
    assert "nothing beats it" in refused.stderr
    fails = probe_record(tmp_path, "fails")
    assert patch("check", BMM, "--env", env, "--probe", str(fails)).returncode == 1
    done = patch("apply", BMM, "--env", env, "--probe", str(fails))
    assert done.returncode == 0, done.stderr
    assert '"cudnn"' in (Path(env) / FP8).read_text()
    kept = json.loads(ledger.evidence_path(find_tree(Path(env)), BMM).read_text())
    assert kept["backends"][0]["outcome"] == "fails"


def test_check_mends_what_was_cut_short_and_says_so(env: str) -> None:
    before = snapshot(Path(env))
    assert patch("apply", HEAD, "--env", env).returncode == 0
    tree = find_tree(Path(env))
    ledger.state_path(tree, HEAD, "applied").rename(ledger.state_path(tree, HEAD, "applying"))
    dry = patch("check", "--env", env, "--dry-run", "--json")
    assert json.loads(dry.stdout)["unfinished"] == [f"applying {HEAD} was cut short"]
    assert snapshot(Path(env)) != before
    found = json.loads(patch("check", "--env", env, "--json").stdout)
    assert "had been cut short" in found["mended"][0]
    assert snapshot(Path(env)) == before


def test_verify_is_a_gate(env: str) -> None:
    assert patch("verify", "--env", env).returncode == 0
    wanted = patch("verify", HEAD, "--env", env, "--version", "0.5.18")
    assert wanted.returncode == 1
    assert f"not to be started: the patch {HEAD} is not applied" in wanted.stderr
    assert patch("apply", HEAD, "--env", env).returncode == 0
    done = patch("verify", HEAD, "--env", env, "--json")
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert (told["intact"], told["version"], told["applied"]) == (True, "0.5.18", [HEAD])
    (Path(env) / DFLASH).write_text(METHOD)
    gone = patch("verify", "--env", env)
    assert gone.returncode == 1
    assert "SGLang has been installed again over it" in gone.stderr
    assert f"fix: dflash-deploy patch check --env {env}" in gone.stderr


def test_a_name_is_the_environments_and_an_adopted_one_is_not_changed_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a folder of the same name that happens to stand here; and only its folder's own name changes it."""
    venv = tmp_path / "theirs"
    site_packages = install(venv / "lib" / "python3.11" / "site-packages")
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(sys.executable)
    pin = pin_of_source("path", str(venv))
    record = EnvironmentRecord(
        name="mine",
        pin=pin,
        made_at="",
        made_by="",
        installer="adopted",
        python_version="3.11",
        packages={},
        adopted=str(venv),
    )
    stamp = environments.folder_of("mine") / environments.STAMP
    write_atomic(stamp, records.write_text(record))
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    before = snapshot(venv)
    found = json.loads(patch("check", "--env", "mine", "--json").stdout)
    assert found["environment"]["site_packages"] == str(site_packages)
    for words in (["apply", HEAD], ["revert"]):
        refused = patch(*words, "--env", "mine")
        assert refused.returncode == 2
        assert f"--env {venv}" in refused.stderr
    assert snapshot(venv) == before
    assert patch("apply", HEAD, "--env", "mine", "--dry-run").returncode == 0
    assert patch("apply", HEAD, "--env", str(venv)).returncode == 0
    assert snapshot(venv) != before


def test_nothing_of_an_environment_acts_on_a_terminal(tmp_path: Path) -> None:
    env = install(
        tmp_path, version="0.5.18", files={DFLASH: METHOD.replace("torch.matmul(", "'\x1b[31m'+p(")}
    )
    (env / "sglang-0.5.18.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.18\x1b]0;x\x07\n")
    for words in (["check"], ["apply", HEAD], ["verify", "--version", "1"]):
        done = patch(*words, "--env", str(env))
        assert "\x1b" not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["check", "--env", "/no/such/place"], 4, "no such environment"),
        (["check", "--env", "x" * 300], 4, "no such environment"),
        (["check"], 2, "no environment is named"),
        (["check", "--env", "main"], 4, "there is no environment main"),
        (["check", "nonsense", "--env", "/"], 2, "no patch is named"),
        (["revert", HEAD], 2, "no environment is named"),
        (["apply", HEAD, "--set", "x"], 2, "expected KEY=VALUE"),
    ],
)
def test_mistakes_are_told_without_a_traceback(words: list[str], status: int, said: str) -> None:
    done = patch(*words)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_drifted_code_is_shown(tmp_path: Path) -> None:
    env = str(install(tmp_path, files={DFLASH: METHOD.replace("torch.matmul(", "product(")}))
    done = patch("check", HEAD, "--env", env)
    assert done.returncode == 1
    assert "drifted" in done.stdout
    assert "product(hidden" in done.stdout
    refused = patch("apply", HEAD, "--env", env)
    assert refused.returncode == 1
    assert "product(hidden" in refused.stderr
