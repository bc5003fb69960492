"""Run as a process of its own: load the CUDA driver's library and start it, and print JSON.

NVML (nvidia-smi) answers on machines where CUDA itself cannot be started. Nothing is allocated on a card.
Standard library only, any Python 3.
"""

from __future__ import annotations

import ctypes
import json
import sys

LIBRARY = "libcuda.so.1"


def main() -> None:
    """Print what the loader says, or the driver's answer."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        sys.stdout.write(json.dumps({"missing": str(error)}))
        return
    sys.stdout.write(json.dumps({"code": library.cuInit(0)}))


if __name__ == "__main__":
    main()
