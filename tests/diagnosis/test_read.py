"""Many logs at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from dflash_deploy.diagnosis import read
from dflash_deploy.diagnosis.catalogue import load_catalogue
from dflash_deploy.diagnosis.read import diagnose

OUT_OF_MEMORY = ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]


def test_threads_that_diagnose_at_once_load_the_catalogue_once(monkeypatch):
    entries, loads = load_catalogue(), []

    def load():
        loads.append(threading.get_ident())
        time.sleep(0.2)  # so that all of them ask before the first has it
        return entries

    read._shipped.cache_clear()
    monkeypatch.setattr(read, "load_catalogue", load)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(diagnose, [OUT_OF_MEMORY] * 4))
    assert len(loads) == 1
    assert all(one.root is not None for one in found)
