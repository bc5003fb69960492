import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """One that nobody has signed, for this machine and for a server behind a proxy, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    request = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=model.example "
        "-addext subjectAltName=DNS:model.example,IP:127.0.0.1"
    )
    names = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    try:
        subprocess.run(["openssl", *request.split(), *names], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    return folder / "cert.pem", folder / "key.pem"
