"""The quantised-head patch under torch: selectors of our own writing are patched, and then run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.live import check
from dflash_deploy.serving_env.patches.operations import apply, revert
from dflash_deploy.serving_env.patches.tree import Tree, find_tree
from tests.serving_env.patches.trees import DFLASH, METHOD_WITH_TP, SHAPES, install, snapshot

from .conftest import RealSglang

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

HEAD = "nvfp4-lm-head"

# A head in NVFP4's manner: four bits a value (E2M1), a scale for each block of 16 in E4M3, one for the whole.
_PRELUDE = """
import json, sys
from types import SimpleNamespace
import torch
from sglang.srt.models import dflash

TOKENS, PADDING, HIDDEN, TAKEN = 1000, 24, 128, 16
LEVELS = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])
calls = []

def quantised(weight):
    blocks = weight.view(weight.shape[0], -1, 16)
    whole = float(weight.abs().max()) / (6 * 448)
    scales = (blocks.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    scaled = blocks / (scales.float() * whole).clamp_min(1e-12)[..., None]
    nearest = (scaled.abs()[..., None] - LEVELS).abs().argmin(-1) + 8 * (scaled < 0)
    codes = nearest.view(weight.shape[0], -1).to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4), scales, whole

def unpacked(packed, scales, whole):
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    values = torch.cat([LEVELS, -LEVELS])[codes]
    return values * (scales.float() * whole).repeat_interleave(16, 1)

class Fp4LinearMethod:
    def apply(self, layer, hidden, bias=None):
        calls.append(hidden.dtype)
        logits = hidden.float() @ unpacked(layer.weight, layer.scales, layer.whole).T
        wide = torch.zeros(len(logits), logits.shape[1] + 8)
        wide[:, : logits.shape[1]] = logits
        return wide[:, : logits.shape[1]].to(hidden.dtype)

class UnquantizedEmbeddingMethod:
    def apply(self, layer, hidden, bias=None):
        raise AssertionError("a dense head is read directly")

torch.manual_seed(5)
original = torch.randn(TOKENS + PADDING, HIDDEN)
original[TOKENS:] *= 50
packed, scales, whole = quantised(original)
shard = SimpleNamespace(num_org_elements=TOKENS, org_vocab_start_index=0)
common = dict(org_vocab_size=TOKENS, shard_indices=shard, tp_size=1)
head = SimpleNamespace(weight=packed, scales=scales, whole=whole, quant_method=Fp4LinearMethod(), **common)

def dense(weight, method=UnquantizedEmbeddingMethod()):
    return SimpleNamespace(weight=weight, quant_method=method, **common)

def candidates(head, hidden):
    model = SimpleNamespace(lm_head=head, candidate_selector=SimpleNamespace(top_k=TAKEN),
                            _transform_unary_logits=lambda logits: logits.float())
    return dflash.DFlash2DraftModel.compute_candidates(model, hidden)

hidden = torch.randn(7, HIDDEN)

def say(**facts):
    print(json.dumps(facts))
"""


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    """An unfixed SGLang of our own writing, not yet patched."""
    return find_tree(install(tmp_path / "site-packages", files={DFLASH: request.param}))


def run(sglang: RealSglang, tree: Tree, code: str) -> subprocess.CompletedProcess[str]:
    """Run code under the serving interpreter's torch, with the tree's SGLang before its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree.root), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [str(sglang.environment.python), "-c", _PRELUDE + textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def facts(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_without_the_patch_the_head_is_refused(sglang: RealSglang, tree: Tree) -> None:
    done = run(sglang, tree, "candidates(head, hidden)")
    assert "requires a dense target lm_head" in done.stderr


def test_a_quantised_head_gives_the_candidates_of_a_dense_reference(sglang: RealSglang, tree: Tree) -> None:
    apply(load_patch(HEAD), tree, {})
    found = facts(
        run(
            sglang,
            tree,
            """
            ids, scores = candidates(head, hidden)
            same_ids, same_scores = candidates(dense(unpacked(packed, scales, whole)), hidden)
            full_ids, full_scores = candidates(dense(original), hidden)
            shared = [len(set(a.tolist()) & set(b.tolist())) / TAKEN for a, b in zip(ids, full_ids)]
            off = (hidden @ (unpacked(packed, scales, whole) - original)[:TOKENS].T).abs().max()
            padding_would_win = bool(((hidden @ original.T).argmax(-1) >= TOKENS).any())
            say(same_ids=bool((ids == same_ids).all()), shared=sum(shared) / len(shared),
                same_scores=float((scores - same_scores).abs().max()), highest=int(ids.max()),
                off=float((scores - full_scores).abs().max()), bound=float(off), won=padding_would_win,
                dtype=str(ids.dtype), calls=[str(one) for one in calls])
            """,
        )
    )
    assert found["same_ids"] is True
    assert isinstance(found["same_scores"], float)
    assert found["same_scores"] < 1e-4
    # Against the head before it was quantised: within what four bits lose, which is less than a rank or two.
    assert isinstance(found["off"], float)
    assert isinstance(found["bound"], float)
    assert found["off"] <= found["bound"] + 1e-4
    assert isinstance(found["shared"], float)
    assert found["shared"] > 0.6
    assert found["won"] is True, "the test's padding must be worth choosing"
    assert isinstance(found["highest"], int)
    assert found["highest"] < 1000
    assert found["calls"] == ["torch.float32"]
    assert found["dtype"] == "torch.int64"


def test_a_dense_head_takes_the_old_path_to_the_last_bit(sglang: RealSglang, tree: Tree) -> None:
    code = """
        taken = {}
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            ids, scores = candidates(dense(original.to(dtype)), hidden)
            taken[str(dtype)] = [ids.tolist(), scores.tolist()]
        say(taken=taken, calls=len(calls))
        """
    before = facts(run(sglang, tree, code))
    apply(load_patch(HEAD), tree, {})
    assert facts(run(sglang, tree, code)) == before
    assert before["calls"] == 0


def test_more_than_one_gpu_is_refused_with_the_reason(sglang: RealSglang, tree: Tree) -> None:
    apply(load_patch(HEAD), tree, {})
    done = run(sglang, tree, "head.tp_size = 2\ncandidates(head, hidden)")
    assert done.returncode != 0
    assert "one GPU (TP = 1) only" in done.stderr


def test_a_part_of_the_vocabulary_is_refused_by_its_size_alone(sglang: RealSglang, tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path, files={DFLASH: METHOD_WITH_TP}))
    apply(load_patch(HEAD), tree, {})
    done = run(sglang, tree, "dflash.TP_SIZE = 2\nhead.org_vocab_size *= 2\ncandidates(head, hidden)")
    assert done.returncode != 0
    assert "one GPU (TP = 1) only" in done.stderr


def test_an_unquantised_method_does_not_make_a_head_quantised(sglang: RealSglang, tree: Tree) -> None:
    apply(load_patch(HEAD), tree, {})
    done = run(sglang, tree, "candidates(dense(packed), hidden)")
    assert "requires a dense target lm_head" in done.stderr


def test_the_shipped_check_tells_a_working_patch_from_a_missing_one(sglang: RealSglang, tree: Tree) -> None:
    environment = Tree(**{**tree.__dict__, "python": sglang.environment.python})
    patch = load_patch(HEAD)
    with pytest.MonkeyPatch.context() as here:
        here.setenv("PYTHONPATH", str(tree.root))
        assert check(patch, environment).outcome == "failed"
        apply(patch, tree, {})
        found = check(patch, environment)
        assert found.outcome == "passed", found.message
        path = tree.root / DFLASH
        path.write_text(path.read_text().replace('logits[..., rows:] = float("-inf")', "pass"))
        unmasked = check(patch, environment)
        assert unmasked.outcome == "failed"
        assert "only pads the vocabulary" in unmasked.message
        path.write_text(path.read_text().replace("None).contiguous()", "None)"))
        assert check(patch, environment).outcome == "failed"


def test_reverting_brings_the_refusal_back(sglang: RealSglang, tree: Tree) -> None:
    apply(load_patch(HEAD), tree, {})
    revert(HEAD, tree)
    done = run(sglang, tree, "candidates(head, hidden)")
    assert "requires a dense target lm_head" in done.stderr


def test_a_patch_that_does_not_do_what_it_should_is_taken_back(sglang: RealSglang, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    site_packages = environment / "lib" / "python3.11" / "site-packages"
    wrong = SHAPES["method"].replace("return ids.long(),", "return ids.long() + 900,")
    install(site_packages, files={DFLASH: wrong})
    (environment / "bin").mkdir()
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sglang.environment.python} "$@"\n')
    python.chmod(0o755)
    before = snapshot(environment)
    done = subprocess.run(
        [sys.executable, "-m", "dflash_deploy", "patch", "apply", HEAD, "--env", str(environment)],
        env={**os.environ, "PYTHONPATH": str(site_packages), "VIRTUAL_ENV": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout
    assert "does not do here what it should" in done.stderr
    assert "only pads the vocabulary" in done.stderr
    assert snapshot(environment) == before
