"""What comes first, what follows, and what is told of a failure that nobody knows."""

from __future__ import annotations

import json

import pytest

from dflash_deploy.diagnosis import Diagnosis, diagnose

from . import logs

NO_KV = (
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
    "Current value: mem_fraction_static=0.7"
)
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of "
    "31.36 GiB of which 604.06 MiB is free."
)


def ids(diagnosis: Diagnosis) -> list[str]:
    return [finding.id for finding in diagnosis.findings if finding.severity == "error"]


@pytest.mark.parametrize("first", [OOM, ILLEGAL])
def test_of_two_causes_the_earlier_comes_first(first):
    second = ILLEGAL if first == OOM else OOM
    lines = [*logs.boot("serving"), *logs.traceback(first, "serving"), "", *logs.traceback(second, "serving")]
    expected = {OOM: "oom-serving", ILLEGAL: "illegal-memory-access"}
    assert ids(diagnose(lines)) == [expected[first], expected[second]]


def test_a_cause_comes_before_what_is_said_in_general_of_it_even_if_it_is_logged_later():
    lines = [
        "ninja: build stopped: subcommand failed.",
        "nvcc fatal   : Unsupported gpu architecture 'compute_120a'",
        "RuntimeError: Ninja build failed.",
    ]
    assert ids(diagnose(lines)) == ["nvcc-arch"]


def test_the_inner_exception_is_the_cause_and_the_outer_is_not_told_again():
    inner = "RuntimeError: bmm_fp8_internal_cublaslt failed: CUBLAS_STATUS_NOT_SUPPORTED"
    outer = f"Exception: Capture cuda graph failed: {inner.partition(': ')[2]}"
    message = f"{inner}\n\nDuring handling of the above exception, another exception occurred:\n\n{outer}"
    diagnosis = diagnose(logs.failed(message, "verify-capture"))
    assert ids(diagnosis) == ["cublas-not-supported"]
    assert diagnosis.root.stage == "verify-capture"
    assert diagnosis.root.confidence == "high"


@pytest.mark.parametrize(
    ("status", "text", "cause"),
    [
        (503, "'<html>The requested URL could not be retrieved'", "asks-itself-through-proxy"),
        (502, "''", "asks-itself-through-proxy"),
        (500, "'Internal Server Error'", "unknown-failure"),
        (401, '\'{"error":"Unauthorized"}\'', "unknown-failure"),
    ],
)
def test_what_a_server_answers_itself_came_from_no_proxy(status, text, cause):
    message = f"AssertionError: res=<Response [{status}]>, res.text={text}"
    assert ids(diagnose(logs.failed(message, "serving"))) == [cause]


def test_what_a_server_outlived_is_no_error():
    lines = logs.boot("serving", until_ready=True)
    lines[8:8] = ["RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"]
    diagnosis = diagnose(lines)
    assert diagnosis.root is None
    assert [finding.severity for finding in diagnosis.findings if finding.id == "nvcc-missing"] == ["warning"]


def test_a_service_started_again_and_again_tells_the_first_reason():
    starts = [*logs.failed(OOM, "serving"), *logs.failed(NO_KV, "sizing")]
    diagnosis = diagnose(starts)
    assert ids(diagnosis) == ["oom-serving", "no-kv-memory"]
    assert any("2 starts" in note for note in diagnosis.notes)


def test_a_start_with_other_flags_is_another_story():
    changed = [
        line.replace("mem_fraction_static=0.9,", "mem_fraction_static=0.7,")
        for line in logs.failed(NO_KV, "sizing")
    ]
    diagnosis = diagnose([*logs.failed(OOM, "serving"), *changed])
    assert ids(diagnosis) == ["no-kv-memory"]
    mended = [
        line.replace("mem_fraction_static=0.9,", "mem_fraction_static=0.8,") for line in logs.boot("serving")
    ]
    assert diagnose([*logs.failed(OOM, "serving"), *mended]).root is None


def test_ranks_that_fail_alike_are_one_finding_with_all_their_lines():
    first, second = (logs.failed(OOM, "serving", rank=f" TP{rank}") for rank in (0, 1))
    at = len(logs.boot("serving"))
    mixed = [*first[:at], *[line for pair in zip(first[at:], second[at:], strict=True) for line in pair]]
    diagnosis = diagnose(mixed)
    assert ids(diagnosis) == ["oom-serving"]
    assert diagnosis.root.count == 2


@pytest.mark.parametrize(
    "wrap",
    [
        lambda line: f"\x1b[31m{line}\x1b[0m",
        lambda line: f"2026-08-24T13:33:00.123456789Z {line}",
        lambda line: f"sglang-1  | {line}",
        lambda line: f"Aug 24 13:33:00 box python[1234]: {line}",
        lambda line: f"2026-08-24T13:33:00+0000 box python[1234]: {line}",
        lambda line: f"> {line}",
        lambda line: f"(EngineCore_DP0 pid=4242) ERROR 08-24 13:33:00 [core.py:718] {line}",
        lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-08-24T13:33:00Z"}),
        lambda line: json.dumps({"MESSAGE": line, "_PID": "7"}),
    ],
)
def test_what_stands_around_lines_does_not_matter(wrap):
    message = "AssertionError: extra_buffer_lazy unsupported with spec."
    lines = [wrap(line) for line in logs.traceback(message, "load")]
    assert ids(diagnose(lines)) == ["extra-buffer-lazy-refused"]


def test_an_unknown_failure_tells_its_stage_innermost_exception_frame_and_lines():
    message = (
        "WeirdError: the flux is negative\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", line 9, in run\n'
        "RuntimeError: could not go on"
    )
    diagnosis = diagnose(logs.failed(message, "load"))
    unknown = diagnosis.unknown
    assert diagnosis.root.id == "unknown-failure"
    assert unknown.stage == "load"
    assert unknown.exception == "WeirdError: the flux is negative"
    assert 'loader.py", line 413, in load_model' in unknown.frame
    assert 8 <= len(unknown.excerpt) <= 20
    assert any(line.text == unknown.exception for line in unknown.excerpt)
    assert "child-died" in [finding.id for finding in diagnosis.findings[1:]]


def test_an_exit_status_without_a_word_is_a_failure():
    assert diagnose(logs.boot("load"), exit_status=-9).root.id == "killed"
    assert diagnose(logs.boot("load"), exit_status=137).root.id == "killed"
    assert diagnose(logs.boot("load"), exit_status=1).root.id == "unknown-failure"
    assert diagnose(logs.boot("serving"), exit_status=0).root is None
    assert diagnose(logs.boot("serving"), exit_status=-15).root is None


def test_a_cause_in_the_log_weighs_more_than_the_exit_status():
    assert ids(diagnose(logs.failed(NO_KV, "sizing"), exit_status=-9))[0] == "no-kv-memory"


def test_flags_that_the_caller_knows_are_taken():
    lines = ["Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 20.00 MiB."]
    root = diagnose(lines, flags={"mem-fraction-static": 0.88, "max-running-requests": 2}).root
    assert dict(root.fix.flags) == {"cuda-graph-max-bs-decode": 2, "mem-fraction-static": 0.85}


def test_the_web_server_alone_does_not_serve_yet():
    root = diagnose([*logs.boot("first-request"), *logs.traceback(OOM, "serving")]).root
    assert (root.id, root.severity) == ("oom-first-request", "error")
    vllm = ["(APIServer pid=1) INFO:     Application startup complete.", *logs.traceback(OOM, "serving")]
    assert diagnose(vllm).root.id == "oom-serving"


def test_an_engine_core_of_vllm_that_fails_is_named():
    prefix = "(EngineCore_DP0 pid=272) ERROR 08-20 12:00:00 [core.py:718] "
    message = "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (939)"
    lines = [prefix + line for line in ("EngineCore failed to start.", *logs.traceback(message, "sizing"))]
    lines += ["(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."]
    diagnosis = diagnose(lines)
    assert ids(diagnosis) == ["vllm-state-blocks"]
    assert diagnosis.root.confidence == "high"


def test_what_people_write_to_the_model_is_no_failure():
    said = (
        "[2026-08-24 13:33:00] Receive: obj=GenerateReqInput(text='CUDA out of memory. Tried to allocate 5')"
    )
    assert diagnose([*logs.boot("serving"), said]).findings == ()


def test_no_key_is_ever_repeated():
    lines = [
        *logs.boot("load"),
        "ValueError: Unknown quantization method: x api_key='sk-very-secret-key' boom",
    ]
    diagnosis = diagnose(lines)
    assert diagnosis.root.id == "quantization-unknown"
    assert "sk-very" not in repr(diagnosis)


def test_a_benign_traceback_hides_no_failure_that_follows():
    harmless = logs.traceback(
        "OSError: libavutil.so.60: cannot open shared object file: No such file", "load"
    )
    lines = [*logs.boot("load"), *harmless, "", *logs.failed(NO_KV, "sizing")[len(logs.boot("load")) :]]
    diagnosis = diagnose(lines)
    assert ids(diagnosis) == ["no-kv-memory"]
    assert "optional-decoders" in [finding.id for finding in diagnosis.benign]
