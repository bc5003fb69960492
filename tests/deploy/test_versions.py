from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.deploy.versions import Versions, read_versions, staleness

_THEN = Versions("0.5.23", "610.43", "a" * 40, "b" * 40, ("lm-head",))


def test_nothing_has_changed():
    assert staleness(_THEN, _THEN) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine": "0.5.24"}, "SGLang was 0.5.23 and is 0.5.24"),
        ({"driver": "611.1"}, "the NVIDIA driver was 610.43 and is 611.1"),
        ({"model": "c" * 40}, "the model has changed"),
        ({"draft": "c" * 40}, "the draft model has changed"),
        ({"patches": ()}, "the patch lm-head is gone, or not as it was applied"),
        ({"patches": ("lm-head", "bmm")}, "the patch bmm has been applied"),
    ],
)
def test_each_change_is_told(change: dict[str, object], said: str):
    assert staleness(_THEN, replace(_THEN, **change)) == (said,)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["engine", "driver", "model", "draft", "patches"])
def test_what_is_not_known_has_not_changed(field: str):
    unknown = replace(_THEN, **{field: None})
    assert staleness(_THEN, unknown) == staleness(unknown, _THEN) == ()


def test_a_models_folder_and_a_hub_name_are_told_apart_from_what_they_become(tmp_path: Path):
    model, hub = tmp_path / "model", tmp_path / "hf"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"1234")
    ref = hub / "hub" / "models--org--draft" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("1" * 40)
    driver = tmp_path / "version"
    driver.write_text("610.43.02\n")
    flags = {"model-path": str(model), "speculative-draft-model-path": "org/draft"}

    def read() -> Versions:
        return read_versions(tmp_path / "no-python", flags, hub=hub, driver_file=driver)

    first = read()
    assert first == read()
    assert (first.engine, first.driver, first.draft, first.patches) == ("gone", "610.43.02", "1" * 40, None)
    ref.write_text("2" * 40)
    (model / "model.safetensors").write_bytes(b"12345")
    assert staleness(first, read()) == ("the model has changed", "the draft model has changed")
    ref.write_text("no commit")
    assert read().draft is None
    (model / "config.json").unlink()
    (model / "model.safetensors").unlink()
    model.rmdir()
    assert staleness(first, read()) == ("the model is not there any more: the next start will fail",)


def test_an_environment_that_is_gone_is_told_and_one_that_cannot_be_seen_is_not(tmp_path: Path):
    with_engine = Versions(engine="0.5.23")
    gone = read_versions(tmp_path / "env" / "bin" / "python", {}, hub=None)
    assert staleness(with_engine, gone) == ("SGLang is not there any more: the next start will fail",)
    (tmp_path / "python").touch()
    assert staleness(with_engine, read_versions(tmp_path / "python", {}, hub=None)) == ()
    # What was not there when it was written down has not gone since.
    assert staleness(gone, with_engine) == ()
