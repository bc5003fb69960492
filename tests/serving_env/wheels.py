"""Small wheels of our own that stand for SGLang and torch, so that installing them is real and quick."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str | bytes], requires: Iterable[str] = ()
) -> Path:
    """A wheel with these files, and metadata as its standard wants it."""
    about = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    tags = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    scripts = f"[console_scripts]\n{name}-say = {name}:say\n"
    content = {
        **files,
        f"{about}/METADATA": metadata,
        f"{about}/WHEEL": tags,
        f"{about}/entry_points.txt": scripts,
    }
    record = ""
    for path, data in content.items():
        raw = data.encode() if isinstance(data, str) else data
        digest = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(raw)}\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, data in content.items():
            archive.writestr(place, data)
        archive.writestr(f"{about}/RECORD", record + f"{about}/RECORD,,\n")
    return path


def write_engine(folder: Path, version: str, torch: str) -> None:
    """An engine and its torch."""
    module = f"__version__ = {version!r}\n\ndef say():\n    print('engine', __version__)\n"
    write_wheel(
        folder,
        "sglang",
        version,
        {"sglang/__init__.py": module, "sglang/srt/__init__.py": "", "sglang/data.bin": b"\0\1" * 5000},
        [f"torch=={torch}"],
    )
    write_wheel(folder, "torch", torch, {"torch/__init__.py": f"__version__ = {torch!r}\n"})
