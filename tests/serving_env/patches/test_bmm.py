from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.errors import DeployError
from dflash_deploy.serving_env.patches.bmm import (
    BackendReport,
    Call,
    ProbeReport,
    decide,
    read_report,
    read_report_file,
)

PROBE = Path(__file__).parents[3] / "dflash_deploy" / "inside" / "bmm_probe.py"


def works(
    backend: str, steady_s: float = 20e-6, first_s: float = 1e-4, rows: tuple[int, ...] = (8, 16)
) -> BackendReport:
    calls = tuple(
        Call(m=m, k=5120, n=8192, first_s=first_s, steady_s=steady_s, relative_error=0.002, correct=True)
        for m in rows
    )
    return BackendReport(backend=backend, outcome="works", calls=calls)


def fails(backend: str, message: str = "CUBLAS_STATUS_NOT_INITIALIZED") -> BackendReport:
    return BackendReport(backend=backend, outcome="fails", message=message)


def report(*backends: BackendReport, cudnn: str | None = "9.24.0") -> ProbeReport:
    return ProbeReport(schema_version=1, measured=True, device="a card", cudnn=cudnn, backends=backends)


def test_without_a_gpu_nothing_is_decided() -> None:
    decision = decide(ProbeReport(schema_version=1, measured=False, problem="no CUDA device is here"))
    assert not decision.decided
    assert decision.backend is None
    assert decision.reason == "no CUDA device is here"


def test_a_default_that_works_and_is_not_beaten_stays() -> None:
    decision = decide(report(works("cublas"), works("cudnn", 21e-6), fails("cutlass", "no kernel")))
    assert decision.decided
    assert decision.backend is None


def test_one_5090_without_cublas_takes_cudnn() -> None:
    decision = decide(report(fails("cublas"), works("cudnn", first_s=0.3), fails("cutlass", "no kernel")))
    assert decision.backend == "cudnn"
    assert "CUBLAS_STATUS_NOT_INITIALIZED" in decision.reason
    assert "0.3 s (measured)" in decision.reason


def test_a_back_end_that_stalls_on_new_shapes_does_not_replace_one_that_works() -> None:
    for stall_s in (0.2, 17.0):
        decision = decide(report(works("cublas", 20e-6), works("cudnn", 10e-6, first_s=stall_s)))
        assert decision.backend is None
        assert "stalls on each new number of rows" in decision.reason


def test_the_very_first_call_may_take_long() -> None:
    quick = works("cutlass", 10e-6)
    first = quick.calls[0].model_copy(update={"first_s": 40.0})
    quick = quick.model_copy(update={"calls": (first, *quick.calls[1:])})
    assert decide(report(works("cublas"), quick)).backend == "cutlass"


def test_what_is_not_here_is_not_told_as_working() -> None:
    """It made no call, which is no speed of 0 µs."""
    absent = BackendReport(
        backend="first-path", outcome="absent", message="it takes none of these shapes here"
    )
    (line,) = [one for one in decide(report(works("cublas"), absent)).evidence if "first-path" in one]
    assert line == "first-path is not here (it takes none of these shapes here)"


def test_old_cudnn_is_never_taken() -> None:
    old = decide(report(fails("cublas"), works("cudnn"), cudnn="9.23.0"))
    assert old.backend is None
    assert old.fix is not None
    assert "9.23.1" in old.fix
    assert (
        decide(report(fails("cublas"), works("cudnn"), works("cutlass", 1e-3), cudnn="9.8.0")).backend
        == "cutlass"
    )
    assert decide(report(fails("cublas"), works("cudnn"), cudnn="9.23.1")).backend == "cudnn"
    assert decide(report(fails("cublas"), works("cudnn"), cudnn=None)).backend == "cudnn"


def test_where_the_default_fails_one_without_stalls_goes_first() -> None:
    decision = decide(report(fails("cublas"), works("cudnn", 10e-6, first_s=5.0), works("cutlass", 30e-6)))
    assert decision.backend == "cutlass"


@pytest.mark.parametrize("outcome", ["wrong", "stalls", "fails"])
def test_a_default_that_does_anything_but_work_has_failed(outcome: str) -> None:
    default = works("cublas").model_copy(update={"outcome": outcome})
    assert decide(report(default, works("cutlass", 1.0, first_s=0.1))).backend == "cutlass"


def test_a_wrong_or_partial_rival_never_wins() -> None:
    wrong = works("cudnn", 1e-6).model_copy(update={"outcome": "wrong"})
    partial = works("cutlass", 1e-6, rows=(8,))
    assert decide(report(works("cublas"), wrong, partial)).backend is None


def test_sglangs_own_first_path_is_told_but_not_chosen() -> None:
    decision = decide(report(works("cublas"), works("first-path", 1e-6)))
    assert decision.backend is None
    assert any(line.startswith("first-path works") for line in decision.evidence)


_REPORTS = st.lists(
    st.builds(
        works,
        st.sampled_from(["cublas", "cudnn", "cutlass", "auto", "first-path"]),
        st.floats(1e-6, 1e-2),
        st.floats(0, 20),
    ).flatmap(lambda one: st.sampled_from([one, one.model_copy(update={"outcome": "fails"})])),
    unique_by=lambda one: one.backend,
)


@given(_REPORTS, st.sampled_from([None, "9.22.0", "9.23.1", "10.0.0", "nonsense"]))
def test_only_a_back_end_that_worked_is_ever_taken(backends: list[BackendReport], cudnn: str | None) -> None:
    decision = decide(report(*backends, cudnn=cudnn))
    if decision.backend is not None:
        taken = {one.backend: one for one in backends}[decision.backend]
        assert taken.outcome == "works"
        assert decision.backend != "cublas"
        assert not (cudnn == "9.22.0" and decision.backend in {"cudnn", "auto"})


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"schema_version": 1, "measured": true, "backends": [{}]}']
)
def test_what_is_no_record_is_refused(content: str) -> None:
    with pytest.raises(DeployError, match="not a record of the FP8 probe"):
        read_report(content, "a file")


def test_a_file_that_is_no_record_is_told_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(DeployError, match="no regular file"):
            read_report_file(path)
    with pytest.raises(DeployError, match="no such record") as caught:
        read_report_file(tmp_path / "absent.json")
    assert "patch measure --out" in str(caught.value.fix)


# The probe's parent, with children of our own in the place of back ends.


@pytest.fixture
def probe() -> dict[str, Any]:
    return runpy.run_path(str(PROBE))


def child(code: str) -> list[str]:
    head = (
        "import json, sys, time\n"
        f"def tell(**said): print({'DFLASH-DEPLOY-BMM '!r} + json.dumps(said), flush=True)\n"
        "call = dict(m=8, k=1, n=1, first_s=0.1, steady_s=0.01, relative_error=0.0, correct=True)\n"
    )
    return [sys.executable, "-c", head + code]


@pytest.mark.parametrize(
    ("code", "outcome", "said"),
    [
        ("tell(call=call); tell(end='works')", "works", None),
        ("print('noise'); tell(call={**call, 'correct': False}); tell(end='works')", "wrong", None),
        (
            "tell(call=call); tell(end='fails', message='CUBLAS_STATUS_NOT_INITIALIZED')",
            "fails",
            "NOT_INITIALIZED",
        ),
        ("tell(call=call); import os; os.kill(os.getpid(), 11)", "fails", "SIGSEGV"),
        ("raise SystemExit('boom')", "fails", "exit status 1: boom"),
        ("tell(call=call)", "fails", "exit status 0"),
        ("tell(call=call); time.sleep(600)", "stalls", "after 1 calls"),
    ],
)
def test_a_child_is_told_by_what_became_of_it(
    probe: dict[str, Any], code: str, outcome: str, said: str | None
) -> None:
    call_timeout_s = 1.0 if outcome == "stalls" else 60.0
    found = probe["run_child"](child(code), load_timeout_s=60.0, call_timeout_s=call_timeout_s)
    assert found["outcome"] == outcome
    assert said is None or said in found["message"]
    BackendReport(backend="x", **found)


def test_a_child_that_never_loads_is_ended(probe: dict[str, Any]) -> None:
    found = probe["run_child"](child("time.sleep(600)"), load_timeout_s=0.5, call_timeout_s=60.0)
    assert found["outcome"] == "stalls"
    assert found["calls"] == []


def test_the_probe_says_what_it_lacks_as_a_value() -> None:
    done = subprocess.run([sys.executable, str(PROBE)], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("DFLASH-DEPLOY-BMM "))
    found = ProbeReport.model_validate(json.loads(line.partition(" ")[2]))
    assert not found.measured
    assert found.problem is not None
    assert not decide(found).decided


@pytest.mark.parametrize(
    ("number", "text"), [(92301, "9.23.1"), (91002, "9.10.2"), (8907, "8.9.7"), (None, None)]
)
def test_cudnn_versions_are_read(probe: dict[str, Any], number: int | None, text: str | None) -> None:
    assert probe["_cudnn_text"](number) == text


def test_a_probe_that_is_killed_leaves_no_back_end_running(tmp_path: Path) -> None:
    """One that hangs would keep the card's memory for ever."""
    told = tmp_path / "pid"
    child = (
        f"import os, runpy, time; runpy.run_path({str(PROBE)!r})['_end_with_the_probe']();"
        f"open({str(told)!r}, 'w').write(str(os.getpid()));"
        f"os.rename({str(told)!r}, {str(told) + '-whole'!r});"
        "time.sleep(600)"
    )
    code = (
        f"import runpy, sys; runpy.run_path({str(PROBE)!r})['run_child']"
        f"([sys.executable, '-c', {child!r}], load_timeout_s=600, call_timeout_s=600)"
    )
    probe = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: Path(f"{told}-whole").exists())
    finally:
        probe.kill()
        probe.wait()
    child_pid = int(Path(f"{told}-whole").read_text())

    def ended() -> bool:
        try:
            return psutil.Process(child_pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(ended)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
