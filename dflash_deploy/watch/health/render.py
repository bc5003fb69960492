"""A health check as a monitoring plugin's line, as lines for people, as JSON, and as Prometheus text."""

from __future__ import annotations

import math
import re
from dataclasses import asdict

from dflash_deploy.machine.text import printable
from dflash_deploy.machine.view import Section
from dflash_deploy.watch.health.verdict import Figure, Health, Layer, Verdict

SCHEMA_VERSION = 1
_TEXT_LIMIT = 400
# Units of the monitoring plugins' guidelines; what they have none for stands bare.
_PLUGIN_UNITS = {"s": "s", "mib": "MB"}
_PROMETHEUS_UNITS = {"s": "seconds", "tokens_per_s": "tokens_per_second", "mib": "bytes", "count": ""}
_NOT_IN_NAME = re.compile(r"[^a-z0-9_]+")


def plugin_line(health: Health) -> str:
    """One line: verdict, what makes it so, and the figures behind ``|`` (perfdata)."""
    said = "; ".join(f"{layer.name}: {layer.text}" for layer in health.worst) or "all layers are well"
    simulated = " (simulated)" if health.simulated else ""
    text = printable(f"{health.service}{simulated}: {said}", longest=_TEXT_LIMIT).replace("|", "/")
    figures = [perfdata(figure) for layer in health.layers for figure in layer.figures]
    told = " ".join([*dict.fromkeys(figures), f"took={_number(health.took_s)}s;;;0;"])
    return f"DFLASH {health.verdict.name} - {text} | {told}"


def perfdata(figure: Figure) -> str:
    """``label=value[unit];warning;critical;minimum;``. MiB are told as MB, which the guidelines count so."""
    label = _label(figure)
    unit = _PLUGIN_UNITS.get(figure.unit, "")
    # The guidelines' ranges: "300:" warns below 300, "300" above it.
    falling = ":" if figure.name in _LESS_IS_WORSE else ""
    limits = [
        "" if limit is None else f"{_number(limit)}{falling}" for limit in (figure.warning, figure.critical)
    ]
    return f"{label}={_number(figure.value)}{unit};{limits[0]};{limits[1]};0;"


_LESS_IS_WORSE = frozenset({"vram_free", "disk_free_least", "accept_length"})


def people_sections(health: Health) -> tuple[Section, ...]:
    """All layers, each with its verdict and what helps."""
    simulated = " (simulated)" if health.simulated else ""
    rows: list[tuple[str, str]] = []
    for layer in health.layers:
        text = printable(layer.text, longest=_TEXT_LIMIT)
        rows.append((printable(layer.name), f"{layer.verdict.name.lower()}: {text}"))
        if layer.fix and layer.verdict is not Verdict.OK:
            rows.append(("", f"fix: {printable(layer.fix, longest=_TEXT_LIMIT)}"))
    title = (
        f"{printable(health.service)}: {health.verdict.name.lower()}{simulated}, after {health.took_s:.1f} s"
    )
    return (Section(title, tuple(rows)),)


def as_json(health: Health) -> dict[str, object]:
    """The keys that docs/json.md describes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "simulated" if health.simulated else "measured",
        "service": health.service,
        "verdict": health.verdict.name.lower(),
        "starting": health.starting,
        "pid": health.pid,
        "took_s": round(health.took_s, 3),
        "layers": [_layer_json(layer) for layer in health.layers],
    }


def _layer_json(layer: Layer) -> dict[str, object]:
    return {
        "name": layer.name,
        "verdict": layer.verdict.name.lower(),
        "text": printable(layer.text, longest=_TEXT_LIMIT),
        "fix": layer.fix,
        "needed": layer.needed,
        "figures": [
            {**asdict(figure), "value": figure.value if math.isfinite(figure.value) else None}
            for figure in layer.figures
        ],
    }


def prometheus(health: Health, *, now_s: float) -> str:
    """A file for the node exporter's textfile collector.

    Args:
        health: what was found.
        now_s: seconds since the epoch, so that an alarm can tell when nobody checks any more.
    """
    service = f'service="{_escaped(health.service)}"'
    lines = _metric("dflash_health_verdict", "Verdict of all layers: 0 ok, 1 warning, 2 critical, 3 unknown.")
    lines.append(f"dflash_health_verdict{{{service}}} {int(health.verdict)}")
    lines += _metric("dflash_health_layer_verdict", "Verdict of one layer, in the same numbers.")
    verdicts = {_escaped(layer.name): int(layer.verdict) for layer in health.layers}
    lines += [
        f'dflash_health_layer_verdict{{{service},layer="{name}"}} {verdict}'
        for name, verdict in verdicts.items()
    ]
    lines += _metric("dflash_health_simulated", "1 where the server is the simulator.")
    lines.append(f"dflash_health_simulated{{{service}}} {int(health.simulated)}")
    lines += _metric("dflash_health_check_timestamp_seconds", "When this was checked.")
    lines.append(f"dflash_health_check_timestamp_seconds{{{service}}} {_number(now_s)}")
    families: dict[str, dict[str, str]] = {}
    for layer in health.layers:
        for figure in layer.figures:
            unit = _PROMETHEUS_UNITS.get(figure.unit, figure.unit)
            name = "_".join(filter(None, ("dflash_health", _name(figure.name), unit)))
            value = figure.value * (1 << 20) if figure.unit == "mib" else figure.value
            gpu = "" if figure.gpu is None else f',gpu="{figure.gpu}"'
            families.setdefault(name, {})[f"{name}{{{service}{gpu}}}"] = _number(value)
    for name, samples in families.items():
        lines += _metric(name, "What a health check measured.")
        lines += [f"{series} {value}" for series, value in samples.items()]
    return "\n".join(lines) + "\n"


def _metric(name: str, words: str) -> list[str]:
    return [f"# HELP {name} {words}", f"# TYPE {name} gauge"]


def _label(figure: Figure) -> str:
    suffix = "" if figure.gpu is None else f"_gpu{figure.gpu}"
    return f"{_name(figure.name)}{suffix}"


def _name(text: str) -> str:
    return _NOT_IN_NAME.sub("_", text.lower()) or "figure"


def _escaped(text: str) -> str:
    """A label's value as the text format wants it; nothing else in it can end the line."""
    shown = printable(text, longest=200)
    return shown.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    """Digits alone, which every reader takes: no exponent, no NaN."""
    if not math.isfinite(value):
        return "0"
    digits = f"{value:.6f}".rstrip("0").rstrip(".")
    return "0" if digits == "-0" else digits
