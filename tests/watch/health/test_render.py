from __future__ import annotations

import json
import math
import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.machine.view import plain_lines
from dflash_deploy.watch.health import render
from dflash_deploy.watch.health.verdict import Figure, Health, Layer, Verdict

_UNITS = ["s", "mib", "celsius", "watts", "tokens", "tokens_per_s", "ratio", "count"]
_FLOATS = st.floats(min_value=-1e12, max_value=1e12)
_FIGURES = st.builds(
    Figure,
    name=st.text(max_size=20),
    value=st.one_of(_FLOATS, st.just(math.nan), st.just(math.inf)),
    unit=st.sampled_from(_UNITS),
    warning=st.none() | _FLOATS,
    critical=st.none() | _FLOATS,
    gpu=st.none() | st.integers(0, 7),
)
_LAYERS = st.builds(
    Layer,
    name=st.text(max_size=12),
    verdict=st.sampled_from(Verdict),
    text=st.text(max_size=300),
    fix=st.none() | st.text(max_size=100),
    figures=st.lists(_FIGURES, max_size=4).map(tuple),
    needed=st.booleans(),
)
_HEALTHS = st.builds(
    Health,
    service=st.text(max_size=50),
    layers=st.lists(_LAYERS, max_size=6).map(tuple),
    took_s=st.floats(0, 1e6),
    starting=st.booleans(),
    pid=st.none() | st.integers(1, 1 << 22),
    simulated=st.booleans(),
)

# label=value[unit];[warn];[crit];[min];[max] as in the monitoring plugins' guidelines.
_PERFDATA = re.compile(r"[a-z0-9_]+=-?\d+(\.\d+)?(s|MB|)(;(-?\d+(\.\d+)?:?)?){2};0;")
_SAMPLE = re.compile(r'([a-z_][a-z0-9_]*)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (-?\d+(?:\.\d+)?)')


@settings(max_examples=50)
@given(_HEALTHS)
def test_a_plugins_line_is_one_line_with_figures_that_can_be_read_back(health: Health):
    line = render.plugin_line(health)
    assert line.isprintable()
    text, _, figures = line.partition("|")
    assert text.startswith(f"DFLASH {health.verdict.name} - ")
    assert "|" not in figures
    assert all(_PERFDATA.fullmatch(figure) for figure in figures.split())


@settings(max_examples=50)
@given(_HEALTHS)
def test_prometheus_text_is_well_formed_and_names_each_family_once(health: Health):
    lines = render.prometheus(health, now_s=1.8e9).removesuffix("\n").split("\n")
    declared: list[str] = []
    seen: set[tuple[str, str]] = set()
    for line in lines:
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            declared.append(line.split()[2])
            continue
        match = _SAMPLE.fullmatch(line)
        assert match is not None, line
        # A sample belongs to the family declared last.
        assert match[1] == declared[-1]
        seen.add((match[1], match[2]))
    assert len(declared) == len(set(declared))


def _samples(text: str) -> list[str]:
    return [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]


@settings(max_examples=50)
@given(_HEALTHS)
def test_no_series_of_prometheus_text_stands_twice(health: Health):
    found = _samples(render.prometheus(health, now_s=0))
    assert len(found) == len(set(found))


@settings(max_examples=50)
@given(_HEALTHS)
def test_json_and_lines_for_people_never_act_on_a_terminal(health: Health):
    json.loads(json.dumps(render.as_json(health), allow_nan=False))
    assert all(line.isprintable() and len(line) <= 80 for line in plain_lines(render.people_sections(health)))


def test_values_come_out_as_they_went_in():
    figures = (Figure("vram_free", 1024, "mib", 300, 64, 1), Figure("temperature", 71, "celsius", 90))
    health = Health("qwen", (Layer("VRAM", Verdict.WARNING, "little", None, figures),), 1.25)
    line = render.plugin_line(health)
    assert line.startswith("DFLASH WARNING - qwen: VRAM: little | ")
    assert "vram_free_gpu1=1024MB;300:;64:;0;" in line
    assert "temperature=71;90;;0;" in line
    assert line.endswith(" took=1.25s;;;0;")
    text = render.prometheus(health, now_s=1800000000.5)
    assert 'dflash_health_vram_free_bytes{service="qwen",gpu="1"} 1073741824\n' in text
    assert 'dflash_health_layer_verdict{service="qwen",layer="VRAM"} 1\n' in text
    assert 'dflash_health_check_timestamp_seconds{service="qwen"} 1800000000.5\n' in text


def test_the_worst_verdict_counts_and_what_cannot_be_told_only_where_it_is_needed():
    def of(*layers: tuple[Verdict, bool]) -> Verdict:
        return Health(
            "x", tuple(Layer("l", verdict, "", needed=needed) for verdict, needed in layers), 0
        ).verdict

    ok, warning, critical, unknown = Verdict
    assert of((ok, True), (unknown, False)) is ok
    assert of((ok, True), (unknown, True)) is unknown
    assert of((warning, False), (unknown, True)) is warning
    assert of((critical, False), (warning, False), (unknown, True)) is critical
    assert of() is unknown


def test_the_keys_are_documented():
    health = Health("x", (Layer("l", Verdict.OK, "", figures=(Figure("a", 1, "s"),)),), 0)
    documented = (Path(__file__).parents[3] / "docs/json.md").read_text().split("## health --json")[1]
    found = render.as_json(health)
    (layer,) = found["layers"]
    for key in {*found, *layer, *layer["figures"][0]}:
        assert f"`{key}`" in documented
