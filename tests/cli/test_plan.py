"""``dflash-deploy plan`` as a person or a script runs it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.tool import run_tool

COMMAND = (
    "python -m sglang.launch_server --model-path RadixArk/Qwen3.8-27B-NVFP4 --speculative-algorithm DFLASH "
    "--speculative-draft-model-path incoai/Qwen3.8-27B-DFlash2 --speculative-num-draft-tokens 8 "
    "--mem-fraction-static 0.85 --max-running-requests 1 --max-mamba-cache-size 4 --kv-cache-dtype fp8_e4m3 "
    "--mamba-ssm-dtype bfloat16 --disable-prefill-cuda-graph --cuda-graph-bs-decode 1"
)
LAZY = f"{COMMAND} --mamba-radix-cache-strategy extra_buffer_lazy"


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return run_tool("plan", *arguments, text=text)


def planned(*arguments: str, text: str = "") -> dict[str, Any]:
    done = run("--json", *arguments, text=text)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is (done.returncode == 0)
    return found


def test_a_pasted_command_that_fits():
    done = run("--gpu", "rtx-5090", "--", *LAZY.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    for word in ("predicted", "exact", "empirical", "KV tokens", "headroom", "fits", "binding pool"):
        assert word in done.stdout


def test_without_the_two_dashes_the_command_is_still_understood():
    with_dashes = run("--gpu", "rtx-5090", "--json", "--", *LAZY.split())
    without = run("--gpu", "rtx-5090", "--json", *LAZY.split())
    assert without.stdout == with_dashes.stdout


def test_a_command_that_refuses_to_start_names_the_stage_and_the_message():
    done = run("--gpu", "rtx-5090", "--explain", "--", *COMMAND.split())
    assert done.returncode == 1
    assert "fails at stage sizing" in done.stdout
    assert "state cache is too small" in done.stdout
    assert "slots-below-request" in done.stdout
    assert "extra_buffer_lazy" in done.stdout
    assert "cost:" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), None),
        (("--tp-size", "2"), "2 cards like this one (shared by 2)"),
        (("--dp-size", "2"), "2 cards like this one (2 copies of the model)"),
    ],
)
def test_more_cards_than_one_are_told(flags: tuple[str, ...], said: str | None):
    notes = " ".join(planned("--gpu", "rtx-5090", "--", *LAZY.split(), *flags)["notes"])
    assert "cards like this one" not in notes if said is None else said in notes


def test_json_has_the_documented_keys():
    found = planned("--gpu", "32607", "--sglang", "0.5.21", "--users", "1", "--", *LAZY.split())
    assert {
        "pools",
        "kv_tokens",
        "state_slots",
        "slots_per_request",
        "max_running_requests",
        "context_per_user",
        "predicted_peak_mib",
        "headroom_mib",
        "fits",
        "fails_at",
        "binding_pool",
        "advice",
    } <= set(found)
    documented = (Path(__file__).parents[2] / "docs" / "json.md").read_text().split("## plan --json")[1]
    for key in found:
        assert f"`{key}`" in documented
    pools = found["pools"]
    assert isinstance(pools, dict)
    assert all(set(pool) == {"mib", "kind"} for pool in pools.values())
    advice = found["advice"]
    assert isinstance(advice, list)
    assert all({"id", "text", "flags", "cost"} <= set(one) for one in advice)
    assert found["card"] == "rtx-5090"
    assert found["fails_at"] is None
    assert (found["state_slots"], found["slots_per_request"]) == (4, 4)


def test_a_flag_that_the_release_lacks_fails_at_the_arguments():
    old = planned("--gpu", "rtx-5090", "--sglang", "0.5.19", "--", *f"{LAZY} --mamba-backend triton".split())
    assert old["fails_at"] is None
    new = planned("--gpu", "rtx-5090", "--", *f"{LAZY} --cuda-graph-max-bs 4 --no-such-flag 1".split())
    assert new["fails_at"] == "arguments"
    advice = new["advice"]
    assert isinstance(advice, list)
    assert {"flag-ambiguous", "flag-unknown"} <= {one["id"] for one in advice}


def test_from_a_script_and_from_standard_input(tmp_path: Path):
    script = f"#!/bin/sh\nF=0.85\n{LAZY.replace('0.85', '$F').replace(' --', chr(92) + chr(10) + '  --')}\n"
    (tmp_path / "start.sh").write_text(script)
    by_file = planned("--gpu", "rtx-5090", "--from", str(tmp_path / "start.sh"))
    by_pipe = planned("--gpu", "rtx-5090", "--from", "-", text=script)
    by_words = planned("--gpu", "rtx-5090", "--", *LAZY.split())
    assert by_file["pools"] == by_pipe["pools"] == by_words["pools"]
    assert by_file["flags"] == by_words["flags"]


def test_a_profile():
    found = planned("rtx5090-four-users", "--gpu", "rtx-5090")
    assert (found["users"], found["max_running_requests"]) == (4, 4)
    assert found["fits"] is True


def test_free_memory_before_the_load_counts():
    plenty = planned("--gpu", "rtx-5090", "--free-mib", "31000", "--", *LAZY.split())
    little = planned("--gpu", "rtx-5090", "--free-mib", "30000", "--", *LAZY.split())
    assert int(str(plenty["kv_tokens"])) > int(str(little["kv_tokens"]))


def test_an_existing_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        '#!/bin/sh\n[ "$1" = --user ] || { echo "No files found" >&2; exit 1; }\n'
        f"cat <<'EOF'\n[Service]\nExecStart=/opt/venv/bin/{LAZY}\nEOF\n"
    )
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = planned("--gpu", "rtx-5090", "--unit", "sglang.service")
    assert found["source"] == "unit sglang.service"
    assert found["kv_tokens"] == planned("--gpu", "rtx-5090", "--", *LAZY.split())["kv_tokens"]
    systemctl.write_text("#!/bin/sh\necho 'No files found for x.service.' >&2\nexit 1\n")
    gone = run("--gpu", "rtx-5090", "--unit", "x.service")
    assert (gone.returncode, "No files found" in gone.stderr) == (4, True)


LOG = """\
[2026-08-24 13:31:10] server_args={'model_path': 'RadixArk/Qwen3.8-27B-NVFP4', 'context_length': 262144, \
'kv_cache_dtype': 'bf16', 'mem_fraction_static': 0.85, 'max_running_requests': 2, \
'chunked_prefill_size': 2048, 'max_mamba_cache_size': 8, \
'mamba_ssm_dtype': 'float32', 'mamba_radix_cache_strategy': 'extra_buffer_lazy', \
'speculative_algorithm': 'DFLASH', 'speculative_draft_model_path': 'incoai/Qwen3.8-27B-DFlash2', \
'speculative_num_draft_tokens': 8, 'api_key': 'hush'}
[2026-08-24 13:31:19] Load weight begin. avail mem=94.22 GB
[2026-08-24 13:31:26] Load weight end. elapsed=7.12 s, type=Qwen3_5ForConditionalGeneration, \
avail mem=74.52 GB, mem usage=19.70 GB.
[2026-08-24 13:31:26] Load weight begin. avail mem=74.48 GB
[2026-08-24 13:31:27] Load weight end. elapsed=0.40 s, type=DFlash2DraftModel, avail mem=70.75 GB, \
mem usage=3.73 GB.
[2026-08-24 13:31:27] Mamba Cache is allocated. max_mamba_cache_size: 8, conv_state size: 0.02GB, \
ssm_state size: 1.27GB intermediate_ssm_state_cache size: 3.38GB intermediate_conv_window_cache size: 0.03GB
[2026-08-24 13:31:27] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 644884, K size: 19.68 GB, \
V size: 19.68 GB
[2026-08-24 13:31:52] max_total_num_tokens=644884, chunked_prefill_size=2048, max_prefill_tokens=16384, \
max_running_requests=2, context_len=262144, available_gpu_mem=11.99 GB
[2026-08-24 13:31:54] The server is fired up and ready to roll!
"""


def test_a_log_is_compared_with_the_plan(tmp_path: Path):
    log = tmp_path / "server.log"
    log.write_text(LOG)
    found = planned("--from-log", str(log), "--gpu", "rtx-pro-6000", "--sglang", "0.5.19")
    observed = found["observed"]
    assert isinstance(observed, dict)
    assert observed["kv_tokens"]["observed"] == 644884
    assert abs(observed["kv_tokens"]["predicted"] - 644884) < 0.02 * 644884
    assert observed["state_slots"] == {"predicted": 8, "observed": 8}
    assert found["calibration"] is not None
    shown = run("--from-log", str(log), "--gpu", "rtx-pro-6000", "--sglang", "0.5.19")
    assert "predicted and observed" in shown.stdout
    assert "hush" not in shown.stdout + json.dumps(found)
    assert max(map(len, shown.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "nothing to plan"),
        (("--gup", "rtx-5090"), 2, "no such option"),
        (("--gpu", "rtx-5091", "--", *LAZY.split()), 4, "did you mean"),
        (("--gpu", "3", "--", *LAZY.split()), 3, "MiB"),
        (("--gpu", "32 GB", "--", *LAZY.split()), 3, "MiB"),
        (("--gpu", "", "--", *LAZY.split()), 3, "card's name"),
        (("--gpu", "-5", "--", *LAZY.split()), 3, "MiB"),
        (("--gpu", "9" * 25, "--", *LAZY.split()), 3, "MiB"),
        (("--gpu", "rtx-5090", "--sglang", "0.5.23;rm", "--", *LAZY.split()), 3, "no SGLang version"),
        (("--gpu", "rtx-5090", "--free-mib", "nan", "--", *LAZY.split()), 3, "cannot be free"),
        (("--gpu", "rtx-5090", "--from", ""), 3, "empty name"),
        (("--gpu", "rtx-5090", "--from-log", ""), 3, "empty name"),
        (("--gpu", "rtx-5090", "--users", "0", "--", *LAZY.split()), 2, "--users"),
        (("--gpu", "rtx-5090", "--sglang", "latest", "--", *LAZY.split()), 3, "no SGLang version"),
        (("--gpu", "rtx-5090", "--", "python", "train.py"), 3, "no command that starts SGLang"),
        (("--gpu", "rtx-5090", "--", "sglang", "serve", "--port", "1"), 3, "names no model"),
        (("--gpu", "rtx-5090", "--from", "/nowhere/x.sh"), 4, "no such file"),
        (("--gpu", "rtx-5090", "--from", "/"), 3, "cannot be read"),
        (("--gpu", "rtx-5090", "no-such-profile"), 4, "no profile"),
        (("--gpu", "rtx-5090", "--from", "-", "--unit", "x"), 2, "more than one thing"),
        (("--unit", "a b"), 3, "name of a unit"),
        (
            ("--gpu", "rtx-5090", "--", "sglang", "serve", "--model-path", "/no/such/folder"),
            4,
            "no such folder",
        ),
    ],
)
def test_mistakes_end_in_words_and_a_status(arguments: tuple[str, ...], status: int, said: str):
    done = run(*arguments, text="")
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_on_the_processor_has_no_vram_to_plan():
    for words in (("sglang-cpu-smoke",), ("--", *LAZY.split(), "--device", "cpu")):
        done = run(*words)
        assert done.returncode == 4
        assert "on the processor (device: cpu)" in done.stderr
        assert "--gpu" in done.stderr


def test_a_card_by_the_number_that_people_call_it():
    """5090 is no card of 5,090 MiB."""
    assert planned("--gpu", "5090", "--", *LAZY.split())["card"] == "rtx-5090"
    assert planned("--gpu", "8192", "--", *LAZY.split())["card"] is None


@pytest.mark.parametrize("version", ["0.4.9", "9.9.9", "0.5.23.dev7+gabcdef"])
def test_a_release_that_is_not_known_is_said(version: str):
    notes = planned("--gpu", "rtx-5090", "--sglang", version, "--", *LAZY.split())["notes"]
    assert any("is taken" in note or "comes nearest" in note for note in notes)


def test_the_log_of_a_server_that_ran_for_days(tmp_path: Path):
    log = tmp_path / "server.log"
    line = (
        "[2026-08-25 10:00:00] Decode batch, #running-req: 1, #token: 1000, gen throughput (token/s): 200.0\n"
    )
    log.write_text(LOG + line * 20_000)
    found = planned("--from-log", str(log), "--gpu", "rtx-pro-6000", "--sglang", "0.5.19")
    assert found["observed"]["kv_tokens"]["observed"] == 644884


def test_speed_is_told_with_what_it_rests_on():
    found = planned("--gpu", "rtx-5090", "--users", "4", "rtx5090-four-users")
    speed = found["speed"]
    assert speed["kind"] == "predicted"
    assert speed["users"] == 4
    # Published: 719.84 tokens/s together, 192.30 for each; 207.52 for one alone.
    assert speed["total_tokens_per_s"]["low"] <= 719.84 <= speed["total_tokens_per_s"]["high"]
    assert speed["user_tokens_per_s"]["low"] <= 192.30 <= speed["user_tokens_per_s"]["high"]
    assert speed["one_user_tokens_per_s"]["low"] <= 207.52 <= speed["one_user_tokens_per_s"]["high"]
    documented = (Path(__file__).parents[2] / "docs" / "json.md").read_text().split("## plan --json")[1]
    for key in speed:
        assert f"`{key}`" in documented
    shown = run("--gpu", "rtx-5090", "rtx5090-four-users").stdout
    assert "tokens/s for each of 4 users (predicted)" in shown
    assert "of it" in shown
    assert planned("--gpu", "rtx-5090", "--", *COMMAND.split())["speed"] is None, "it does not start"


def test_advice_said_to_make_it_fit_does():
    fails = f"{LAZY} --mem-fraction-static 0.97".replace("--disable-prefill-cuda-graph ", "")
    found = planned("--gpu", "rtx-5090", "--", *fails.split())
    assert found["fits"] is False
    fitting = [one for one in found["advice"] if one["weight"] == "fits"]
    assert fitting
    assert all("it fits" in one["text"] for one in fitting)
    assert not any("not enough alone" in one["text"] for one in found["advice"])


def test_a_plain_case_has_little_to_advise():
    calm = f"{LAZY} --language-model-only".replace("0.85", "0.88")
    shown = run("--gpu", "rtx-5090", "--", *calm.split()).stdout
    advice = shown.split("dvice", 1)[1]
    assert advice.count("change:") <= 2
    assert (
        "1 requests"
        not in run("--gpu", "rtx-5090", "--explain", "--", *calm.split()).stdout.split("Advice")[1]
    )


def test_explanations_have_the_numbers():
    shown = " ".join(run("--gpu", "rtx-5090", "--explain", "--", *LAZY.split()).stdout.split())
    assert "2 requests (one of them padding) x 8 draft tokens x 75,497,472 bytes of one slot's state" in shown
    assert "draft tokens to begin with" in shown


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_a_terminal_of_any_width(columns: int):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-m", "dflash_deploy", "plan", "rtx5090-single-user", "--gpu", "rtx-5090"],
        stdout=slave,
        stdin=subprocess.DEVNULL,
        env=environment,
    ) as process:
        os.close(slave)
        text = b""
        with suppress(OSError):
            while part := os.read(master, 65536):
                text += part
        assert process.wait(60) == 0
    os.close(master)
    lines = text.decode().splitlines()
    assert "KV tokens" in text.decode()
    assert max(map(len, lines)) <= min(columns, 80)


def test_without_a_card_the_list_of_cards_is_told():
    from dflash_deploy.machine.gpu import read_gpus

    if read_gpus().readable:
        pytest.skip("there is a GPU here")
    done = run("--", *LAZY.split())
    assert done.returncode == 4
    assert "rtx-5090" in done.stderr


def test_what_is_known_of_a_release_is_told_beside_its_flags():
    """A quantised head on two cards, before the release that takes it; the FP8 product on this card."""
    drafting = (
        "--speculative-algorithm",
        "DFLASH",
        "--speculative-draft-model-path",
        "incoai/Qwen3.8-27B-DFlash2",
    )
    command = ("sglang", "serve", "--model-path", "RadixArk/Qwen3.8-27B-NVFP4", "--tp-size", "2", *drafting)
    old = planned("--gpu", "rtx-5090", "--sglang", "0.5.18", "--", *command)
    known = {
        "dflash2-needs-0-5-19",
        "quantized-head",
        "quantised-head-tensor-parallel",
        "padded-vocabulary",
        "fp8-bmm-cublas",
    }
    assert known <= {one["id"] for one in old["advice"]}
    assert all(one["cost"] for one in old["advice"])
    new = planned("--gpu", "rtx-5090", "--sglang", "0.5.23", "--", *command)
    assert known & {one["id"] for one in new["advice"]} == {"fp8-bmm-cublas"}
    older_card = planned("--gpu", "rtx-4090", "--sglang", "0.5.23", "--", *command)
    assert not known & {one["id"] for one in older_card["advice"]}


def test_a_hub_name_that_nobody_has_confirmed_is_told():
    found = planned("rtx4090-single-user")
    assert sum("is not confirmed" in note for note in found["notes"]) == 2
    assert not any("is not confirmed" in note for note in planned("rtx5090-single-user")["notes"])
