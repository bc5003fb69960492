from __future__ import annotations

import json
import re
import signal
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_deploy.checkpoint_tools.dense_head import look, make
from dflash_deploy.errors import DeployError, ExitCode

from .checkpoints import (
    bf16,
    memory_mib_of_making_dense,
    nearest_bf16,
    read_tensors,
    reference_row,
    write_checkpoint,
    write_tensors,
)

COMMAND = [sys.executable, "-m", "dflash_deploy", "checkpoint", "dense-head"]


def made(source: Path, destination: Path, **options: object) -> Path:
    make(look(source, **options), destination, say=lambda _line: None)  # type: ignore[arg-type]
    return destination


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("module", ["lm_head", "language_model.lm_head"])
def test_whole_checkpoint(shards, inverse, module, tmp_path):
    rows, columns = 96, 64
    source = write_checkpoint(tmp_path / "source", shards=shards, inverse=inverse, module=module)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    dense = made(source, tmp_path / "new" / "dense")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    file = "model.safetensors" if shards == 1 else "model-00002-of-00002.safetensors"
    old, new = read_tensors(source / file), read_tensors(dense / file)
    kept = {name for name in old if not name.startswith(module)}
    assert set(new) == kept | {f"{module}.weight"}
    assert all(new[name] == old[name] for name in kept)
    dtype, shape, data = new[f"{module}.weight"]
    assert (dtype, shape) == ("BF16", (rows, columns))
    packed = old[f"{module}.weight_packed" if inverse else f"{module}.weight"][2]
    scales = old[f"{module}.weight_scale"][2]
    leaf = "weight_global_scale" if inverse else "weight_scale_2"
    (stored,) = struct.unpack("<f", old[f"{module}.{leaf}"][2])
    scale = Fraction(1 / stored) if inverse else Fraction(stored)
    for row in range(rows):
        expected = reference_row(
            packed[row * 32 : row * 32 + 32], scales[row * 4 : row * 4 + 4], scale, low_first=True
        )
        assert bf16(data[row * 128 : row * 128 + 128]) == [nearest_bf16(value) for value in expected]
    assert (dense / "tokenizer.json").samefile(source / "tokenizer.json")
    if shards == 2:
        other = "model-00001-of-00002.safetensors"
        assert (dense / other).samefile(source / other)
        index = json.loads((dense / "model.safetensors.index.json").read_text())
        assert index["weight_map"][f"{module}.weight"] == file
        for one, place in index["weight_map"].items():
            assert one in read_tensors(dense / place)
        data_bytes = sum(
            len(data) for name in (file, other) for _, _, data in read_tensors(dense / name).values()
        )
        assert index["metadata"]["total_size"] == data_bytes
    config = json.loads((dense / "config.json").read_text())["quantization_config"]
    assert module in config["ignore"]
    if not inverse:
        beside = json.loads((dense / "hf_quant_config.json").read_text())["quantization"]
        assert beside["exclude_modules"] == list(dict.fromkeys(["mtp*", module, "lm_head"]))
        for section in (config, beside):
            assert list(section["quantized_layers"]) == ["model.layers.0.mlp"]
    record = json.loads((dense / "dflash-deploy.json").read_text())["dense_head"]
    assert record["source"] == str(source)
    assert sorted(path.name for path in dense.parent.iterdir()) == ["dense"]


def test_order_is_told_by_a_reference(tmp_path):
    """The dense weights that a head was made from tell which half of a byte comes first."""
    source = write_checkpoint(tmp_path / "source")
    for order in ("low-first", "high-first"):
        reference = made(source, tmp_path / order, order=order)
        found = look(source, reference=reference)
        assert found.order == order
        assert found.cosine is not None
        assert found.cosine > 0.999
    low, high = (
        tmp_path / order / "model-00002-of-00002.safetensors" for order in ("low-first", "high-first")
    )
    assert low.read_bytes() != high.read_bytes()
    with pytest.raises(DeployError, match="is not the one of"):
        look(source, order="low-first", reference=tmp_path / "high-first")
    stranger = made(write_checkpoint(tmp_path / "stranger", seed=9), tmp_path / "other")
    with pytest.raises(DeployError, match="is not the one of"):
        look(source, reference=stranger)


_CHILD = """
import sys
from pathlib import Path
from dflash_deploy.checkpoint_tools.dense_head import look, make
def say(line):
    print(line, flush=True)
    if line.startswith("  ") and len(sys.argv) > 3:
        sys.stdin.readline()
make(look(Path(sys.argv[1])), Path(sys.argv[2]), say=say, save_every_bytes=1 << 20)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_cut_short_and_gone_on_with(number, tmp_path):
    source = write_checkpoint(tmp_path / "source", rows=8192, columns=1024)
    command = [sys.executable, "-c", _CHILD, str(source), str(tmp_path / "dense")]
    child = subprocess.Popen(
        [*command, "slowly"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout
    for line in child.stdout:
        if line.startswith("  "):
            child.send_signal(number)
            break
    child.communicate()
    assert child.returncode != 0
    assert not (tmp_path / "dense").exists()
    (tmp_path / ".dense.making" / ".config.json.left-by-a-kill").touch()
    again = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert re.search(r"going on at 8\.\d+ MiB", again)
    whole = made(source, tmp_path / "whole")
    assert names(tmp_path / "dense") == names(whole)
    for path in whole.iterdir():
        assert (tmp_path / "dense" / path.name).read_bytes() == path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "source", "whole"]


def test_a_source_that_changed_is_not_gone_on_with(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    half = tmp_path / ".dense.making"
    half.mkdir()
    (half / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 100)
    (half / ".progress.json").write_text(
        json.dumps({"key": "another", "done": {"model-00002-of-00002.safetensors": 100}})
    )
    for name in ("leftover", ".config.json.x1y2z3"):
        (half / name).touch()
    made(source, tmp_path / "dense")
    made(source, tmp_path / "again")
    for path in (tmp_path / "again").iterdir():
        assert (tmp_path / "dense" / path.name).read_bytes() == path.read_bytes()
    assert names(tmp_path / "dense") == names(tmp_path / "again")


@pytest.mark.parametrize("what", ["folder", "link", "file"])
def test_what_somebody_else_put_there_is_left_alone(what, tmp_path):
    source = write_checkpoint(tmp_path / "source")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "photo").touch()
    half = tmp_path / ".dense.making"
    match what:
        case "folder":
            theirs.rename(half)
            theirs = half
        case "link":
            half.symlink_to(theirs)
        case "file":
            half.touch()
    with pytest.raises(DeployError, match="left alone"):
        made(source, tmp_path / "dense")
    assert names(theirs) == ["photo"]
    assert not (tmp_path / "dense").exists()


def test_full_disk_is_told_and_can_be_gone_on_with(tmp_path):
    import resource

    source = write_checkpoint(tmp_path / "source", rows=4096, columns=512)
    command = [*COMMAND, str(source), str(tmp_path / "dense")]
    done = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "the disk is full" in done.stderr
    assert not (tmp_path / "dense").exists()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert (tmp_path / "dense" / "config.json").exists()


def test_memory_does_not_grow_with_the_head(tmp_path):
    """A tenth of Qwen3.8-27B's, 242 MiB in BF16 beside 180 of libraries; the real lane makes it whole."""
    assert memory_mib_of_making_dense(tmp_path, rows=24_832) < 300


def test_command(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    command = [*COMMAND, str(source), str(tmp_path / "dense")]
    dry = subprocess.run([*command, "--dry-run", "--json"], capture_output=True, text=True, check=True)
    told = json.loads(dry.stdout)
    assert told["made"] is None
    assert told["shape"] == [96, 64]
    assert told["written"][0]["file"] == "model-00002-of-00002.safetensors"
    assert not (tmp_path / "dense").exists()
    for expected in (0, ExitCode.UNAVAILABLE):  # the second time it is there already
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
        assert done.returncode == expected, done.stderr
    size = (tmp_path / "dense" / "model-00002-of-00002.safetensors").stat().st_size
    assert size == told["written"][0]["bytes"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": ("BF16", (96, 32), bytes(96 * 32 * 2))}, "is dense already"),
        ({"lm_head.weight_scale": ("F8_E4M3", (96, 2), bytes(192))}, "expected a scale for each 16"),
        ({"lm_head.weight_scale": ("BF16", (96, 4), bytes(96 * 8))}, "is not NVFP4"),
        ({"lm_head.weight_scale_2": ("F32", (), struct.pack("<f", float("nan")))}, "is no scale"),
        ({"lm_head.weight_scale_2": ("F32", (), struct.pack("<f", -1.0))}, "is no scale"),
        ({"lm_head.weight_scale_2": ("F32", (2,), bytes(8))}, "expected one number"),
        ({"lm_head.weight_scale_2": None}, "has neither"),
        ({"lm_head.weight": None}, "has no output head"),
        ({"model.lm_head.weight": ("U8", (2, 8), bytes(16))}, "several output heads"),
        ({"lm_head.weight_scale": ("F8_E4M3", (96, 4), b"\x7f" * 384)}, "is not a number"),
    ],
)
def test_heads_that_are_refused(change, message, tmp_path):
    source = write_checkpoint(tmp_path / "source", shards=1)
    tensors = read_tensors(source / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    write_tensors(source / "model.safetensors", tensors)
    with pytest.raises(DeployError, match=message) as caught:
        made(source, tmp_path / "dense")
    assert caught.value.exit_code is ExitCode.INVALID_INPUT
    assert not (tmp_path / "dense").exists()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_files_are_told_of(data, tmp_path_factory):
    place = tmp_path_factory.mktemp("damaged")
    source = write_checkpoint(place / "source", rows=16, columns=32)
    victim = data.draw(st.sampled_from(sorted(path for path in source.iterdir())))
    content = bytearray(victim.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(content), 900) - 1))
        content[at] = data.draw(st.integers(0, 255))
    victim.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        made(source, place / "dense")
    except DeployError as error:
        assert error.message
