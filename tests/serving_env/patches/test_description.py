from __future__ import annotations

from pathlib import Path

import pytest

from dflash_deploy.errors import DeployError
from dflash_deploy.serving_env.advice import ENTRIES
from dflash_deploy.serving_env.patches.description import load_patch, patch_names, patches_dir, read_patch


@pytest.mark.parametrize("name", patch_names())
def test_every_shipped_patch_is_whole(name: str) -> None:
    patch = load_patch(name)
    assert patch.limits
    assert patch.drop_when
    assert patch.advice
    assert set(patch.advice) <= {entry.id for entry in ENTRIES}
    assert (Path(__file__).parents[3] / "dflash_deploy" / "inside" / f"{patch.check}.py").is_file()


def test_an_unknown_patch_is_told_with_the_nearest() -> None:
    with pytest.raises(DeployError, match="did you mean 'nvfp4-lm-head'"):
        load_patch("nvfp4-lmhead")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: bmm-fp8-backend", "name: other", "expected the folder's name"),
        ("file: sglang/", "file: ../sglang/", "below the site-packages folder"),
        ("find: _raw_flashinfer_bmm_fp8(", "find: ((", "is not Python"),
        ("part: backend", "part: other", "has no part \\$other"),
        ("replace: _DFLASH", "replace: $missing", "no part is named"),
        ("replace: _DFLASH", "replace: ${missing}", "no parameter is named"),
        ("insert: replacement.py", "insert: ../../evil.py", "name of a file beside"),
        ("insert: replacement.py", "insert: absent.py", "no file absent.py beside"),
        ("  backend:\n    summary", "  other:\n    summary", "insert: no parameter is named \\['backend'\\]"),
        ("functions: [", "functions: !!python/object/apply:os.system [", "not supported"),
        ("check: check_bmm_backend", "check: ../../evil", "expected one of"),
        ("summary: FlashInfer", "sumary: FlashInfer", "did you mean 'summary'"),
    ],
)
def test_a_wrong_description_is_told_by_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = (patches_dir() / "bmm-fp8-backend" / "patch.yaml").read_text()
    assert old in text
    path = tmp_path / "bmm-fp8-backend" / "patch.yaml"
    path.parent.mkdir()
    path.write_text(text.replace(old, new, 1))
    path.with_name("replacement.py").write_text("CHOSEN = '${backend}'\n")
    with pytest.raises(DeployError, match=said) as caught:
        read_patch(path)
    assert "patch.yaml:" in caught.value.message
