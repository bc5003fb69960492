"""``--gpu``: which of several cards a study is measured on."""

from tests.machine.conftest import run_python
from tests.machine.nvml_stub import StubCard, build_stub, stub_env

ASK = """
import sys
from dflash_deploy.errors import DeployError
from dflash_deploy.profile.load import load_profile
from dflash_deploy.tune.opening import card_here
for number in (None, 0, 1, 2):
    try:
        print(number, card_here(load_profile("rtx5090-single-user"), number))
    except DeployError as error:
        print(number, error.message)
"""


def test_the_card_is_the_one_that_is_asked_for(tmp_path):
    small = StubCard(name="NVIDIA GeForce RTX 3090", total_mib=24576, numbers={"major": 8, "minor": 6})
    # What the person's own variables hide can be chosen all the same.
    hidden = {**stub_env(build_stub(tmp_path), small, StubCard()), "CUDA_VISIBLE_DEVICES": "1"}
    told = run_python(["-c", ASK], {**hidden, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).stdout.splitlines()
    assert told == [
        "None rtx-5090",
        "0 rtx-3090",
        "1 rtx-5090",
        "2 there is no card 2 that can be read here (there: 0, 1)",
    ]
