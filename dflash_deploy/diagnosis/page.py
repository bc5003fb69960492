"""The page of known failures, ``docs/failures.md``, made from the catalogue when run as a program."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from dflash_deploy.diagnosis.catalogue import load_catalogue
from dflash_deploy.diagnosis.entry import Entry
from dflash_deploy.diagnosis.stage import Stage

_HEAD = """# Known failures

What `dflash-deploy diagnose` knows, made from the catalogue (`dflash_deploy/diagnosis/catalogue/`) with
`python -m dflash_deploy.diagnosis.page > docs/failures.md`. What stands in braces is taken from the log.
"""
_FIGURE = re.compile(r"\{[^{}]{1,300}\}")


def page(entries: Sequence[Entry]) -> str:
    """The page, by stage."""
    out = [_HEAD]
    for stage in (*[stage for stage in Stage if stage is not Stage.UNKNOWN], Stage.UNKNOWN):
        here = [entry for entry in entries if entry.stage is stage and entry.severity != "benign"]
        if here:
            title = "Any stage" if stage is Stage.UNKNOWN else stage.value.replace("-", " ").capitalize()
            out += [f"## {title}\n", *map(_entry, here)]
    benign = [entry for entry in entries if entry.severity == "benign"]
    out += ["## Benign\n\nLooks bad, and means nothing.\n", *map(_entry, benign)]
    return "\n".join(out)


def _entry(entry: Entry) -> str:
    engine = "" if entry.engine == "any" else f" ({entry.engine})"
    example = entry.examples[0].log.strip().splitlines()[-1].strip()[:160].replace("`", "'")
    rows = [f"### {entry.id}", "", f"*{entry.severity}*{engine}: {_marked(entry.causes[0].text)}", ""]
    rows += [f"- fix: {_marked(rule.text.text)}" for rule in entry.fixes]
    rows += [f"- versions: {entry.versions}"] if entry.versions else []
    rows += [f"- known from: {'; '.join(entry.evidence)}", f"- example: `{example}`", ""]
    return "\n".join(rows)


def _marked(text: str) -> str:
    return _FIGURE.sub(lambda figure: f"`{figure[0]}`", text.replace("<", "\\<"))


if __name__ == "__main__":
    sys.stdout.write(page(load_catalogue()))
