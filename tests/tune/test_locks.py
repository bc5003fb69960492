import pytest

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.tune.study import alone_on, writing


def test_two_tuners_on_one_card_are_refused_and_the_lock_goes_with_the_holder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with alone_on("GPU-1234/5"):
        with (
            pytest.raises(DeployError, match="another dflash-deploy works on this card") as refused,
            alone_on("GPU-1234/5"),
        ):
            pass
        assert refused.value.exit_code == ExitCode.UNAVAILABLE
        with alone_on("GPU-other"):
            pass
    with alone_on("GPU-1234/5"):
        pass


def test_no_card_no_lock(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with alone_on(None), alone_on(None):
        assert not list(tmp_path.iterdir())


def test_where_no_study_could_begin_none_is_promised(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeployError, match="cannot be written") as refused, alone_on("GPU-1"):
        pass
    assert "is kept" not in refused.value.message
    assert "--resume" not in str(refused.value.fix)
    (tmp_path / "study.json").touch()
    with pytest.raises(DeployError, match="is kept") as refused, writing(tmp_path):
        (tmp_path / "file" / "below").touch()
    assert "--resume" in str(refused.value.fix)
    # A folder that cannot even be looked into is told in the same words.
    with pytest.raises(DeployError, match="File name too long"), writing(tmp_path / ("x" * 300)):
        (tmp_path / ("x" * 300)).touch()
