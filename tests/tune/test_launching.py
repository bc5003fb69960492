import os
import subprocess

from dflash_deploy.tune.launching import Simulated, simulated_launcher

from .samples import profile


def test_modules_of_the_folder_that_one_stands_in_do_not_get_into_the_simulator(tmp_path):
    (tmp_path / "asyncio.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "yaml.py").write_text("raise SystemExit('the wrong one')")
    simulated = Simulated("rtx-5090", 0, 1000.0)
    launcher = simulated_launcher(profile(), simulated, host="127.0.0.1", port=None)
    launch = launcher.launch({"model-path": "nobody/nothing"}, 30000)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    ended = subprocess.run(
        launch.argv,
        cwd=tmp_path,
        env=env | dict(launch.env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "nobody/nothing is not a local folder" in ended.stderr
