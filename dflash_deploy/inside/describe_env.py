"""Run by the interpreter that serves: print what its environment has, as JSON.

``describe_env.py`` reads metadata alone and takes a moment. ``describe_env.py --imports SECONDS`` also
imports torch, flashinfer, sgl_kernel and triton, each in a process of its own that is ended after that time,
so that one that hangs or crashes is an answer like any other.

Standard library only, apart from what is looked at; any Python that SGLang runs on (3.10 among them). The one
line that counts begins with the mark below.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import types
import typing

MARK = "DFLASH-DEPLOY-ENVIRONMENT "
IMPORTS = ("torch", "flashinfer", "sgl_kernel", "triton")
_TOOLS = ("nvcc", "ninja", "g++", "gcc")
_VARIABLES = {"nvcc": ("CUDA_HOME", "CUDA_PATH"), "ninja": (), "g++": ("CXX",), "gcc": ("CC",)}
_CALLED = {"nvcc": ("nvcc",), "ninja": ("ninja",), "g++": ("g++", "c++"), "gcc": ("gcc", "clang")}
_HEADERS = ("cuda_runtime.h", "curand_kernel.h", "cublasLt.h")
_OUTPUT_BYTES = 1 << 20


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
        except Exception:  # noqa: BLE001, S112 -- a damaged one tells nothing
            continue
        if isinstance(name, str) and isinstance(version, str):
            # The first one on the path is the one that is imported.
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found


def _location(module: str) -> str | None:
    """Where a module would be imported from, without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # noqa: BLE001 -- a finder of the environment's own may do anything
        return None
    if spec is None:
        return None
    if spec.origin:
        return os.path.dirname(spec.origin)  # noqa: PTH120 -- a text is wanted
    return next(iter(spec.submodule_search_locations or ()), None)


def _sglang() -> dict[str, object] | None:
    try:
        distribution = importlib.metadata.distribution("sglang")
        version = distribution.version
        direct = distribution.read_text("direct_url.json")
    except Exception:  # noqa: BLE001 -- not there, or damaged: as good as not there
        return None
    location = _location("sglang")
    commit, source, editable = None, None, False
    if direct:
        try:
            told = json.loads(direct)
            source = told.get("url")
            commit = told.get("vcs_info", {}).get("commit_id")
            editable = bool(told.get("dir_info", {}).get("editable"))
        except (ValueError, AttributeError):
            pass
    if commit is None:
        written = re.search(r"\+(?:.*\.)?g([0-9a-f]{7,40})", version)
        commit = written[1] if written else _written_commit(location)
    return {
        "version": version,
        "commit": commit,
        "source": source,
        "editable": editable,
        "location": location,
    }


def _wanted() -> dict[str, str]:
    """Exact versions that the installed SGLang asks for, by normalised name."""
    try:
        required = importlib.metadata.requires("sglang") or []
    except Exception:  # noqa: BLE001 -- as above
        return {}
    wanted = {}
    for line in required:
        written = re.fullmatch(r"([\w.-]+)(?:\[[^]]*\])?\s*\(?==\s*([\w.!+-]+)\)?", line.strip())
        if written:
            wanted[re.sub(r"[-_.]+", "-", written[1]).lower()] = written[2]
    return wanted


def _written_commit(location: str | None) -> str | None:
    if location is None:
        return None
    try:
        with open(os.path.join(location, "_version.py"), encoding="utf-8") as file:  # noqa: PTH118, PTH123
            written = re.search(r"commit_id = '?g?([0-9a-f]{7,40})", file.read(1 << 16))
    except (OSError, ValueError):
        return None
    return written[1] if written else None


def _tool(name: str) -> dict[str, object] | None:
    """A program that kernels are compiled with, as the engine's just-in-time compilers look for it."""
    path = _path_of(name)
    if path is None:
        return None
    problem, output = _output([path, "--version"], 15.0)
    written = re.search(r"release (\d+\.\d+)", output) or re.search(r"(\d+\.\d+(?:\.\d+)*)", output)
    about: dict[str, object] = {"path": path, "version": written[1] if written and not problem else None}
    if problem:
        about["problem"] = problem
    elif name == "nvcc":
        about["missing"] = _headers_missing(path)
    return about


def _path_of(name: str) -> str | None:
    """Where a program is, or should be: a variable that names one is not asked twice."""
    for variable in _VARIABLES[name]:
        if value := os.environ.get(variable, "").strip():
            if name == "nvcc":
                return os.path.join(value, "bin", "nvcc")  # noqa: PTH118
            # More words are its arguments, or it is the argument of a cache.
            return shutil.which(value.split()[0]) or value.split()[0]
    for called in _CALLED[name]:
        if path := shutil.which(called):
            return path
    places = []
    if name == "nvcc":
        in_packages = os.path.join(sysconfig.get_path("purelib"), "nvidia")  # noqa: PTH118
        homes = ["/usr/local/cuda", *(os.path.join(in_packages, part) for part in ("cu13", "cuda_nvcc"))]  # noqa: PTH118
        places = [os.path.join(home, "bin", "nvcc") for home in homes]  # noqa: PTH118
    elif name == "ninja" and _location("ninja"):
        places = [os.path.join(sysconfig.get_path("scripts"), "ninja")]  # noqa: PTH118
    return next((place for place in places if os.access(place, os.X_OK)), None)


def _headers_missing(nvcc: str) -> list[str]:
    """Headers of the toolkit that kernels include, and nvcc does not have."""
    problem, output = _output([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], 15.0)
    line = re.search(r"^#\$ INCLUDES=(.*)$", output, re.MULTILINE)
    if problem or line is None:
        return []
    folders = [*re.findall(r'-I\s*"?([^"\s]+)', line[1]), "/usr/include", "/usr/local/include"]
    return [name for name in _HEADERS if not any(os.path.isfile(os.path.join(one, name)) for one in folders)]  # noqa: PTH113, PTH118


def _output(command: list[str], timeout_s: float) -> tuple[str, str]:
    """How a command ended (``""`` for well) and what it printed."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return str(error), ""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"no answer within {timeout_s:.0f} s", ""
    text = output[-_OUTPUT_BYTES:].decode(errors="replace")
    if process.returncode == 0:
        return "", text
    if process.returncode < 0:
        return f"it was ended by {signal.Signals(-process.returncode).name}", text
    last = [line.strip() for line in text.splitlines() if line.strip()]
    return (last[-1] if last else f"status {process.returncode}")[:1000], text


def _imported(module: str, timeout_s: float) -> dict[str, object]:
    if _location(module) is None:
        return {"installed": False}
    began = time.monotonic()
    problem, output = _output([sys.executable, os.path.abspath(__file__), "--import", module], timeout_s)  # noqa: PTH100
    about: dict[str, object] = {"installed": True, "import_s": round(time.monotonic() - began, 2)}
    for line in reversed(output.splitlines()):
        if line.startswith(MARK):
            try:
                told = json.loads(line[len(MARK) :])
            except ValueError:
                break
            if isinstance(told, dict):
                return {**about, **told}
    return {**about, "error": problem or "it printed no answer"}


def _built_for(torch: types.ModuleType) -> list[str]:
    # torch.cuda.get_arch_list() is empty without a card; the build's own list is not.
    return (torch._C._cuda_getArchFlags() or "").split()


def _capabilities(cuda: types.ModuleType) -> list[str]:
    pairs = [cuda.get_device_capability(index) for index in range(cuda.device_count())]
    return [f"{major}.{minor}" for major, minor in pairs]


def _import(module: str) -> dict[str, object]:
    imported = __import__(module)
    told: dict[str, object] = {"version": str(getattr(imported, "__version__", "")) or None}
    if module == "torch":
        questions: dict[str, typing.Callable[[], object]] = {
            "cuda": lambda: imported.version.cuda,
            "hip": lambda: imported.version.hip,
            "arch_list": functools.partial(_built_for, imported),
            # Each looks its names up when asked: a torch may be damaged.
            "cudnn": lambda: imported.backends.cudnn.version(),  # noqa: PLW0108
            "cuda_available": lambda: imported.cuda.is_available(),  # noqa: PLW0108
            "capabilities": lambda: _capabilities(imported.cuda),
        }
        for name, question in questions.items():
            try:
                told[name] = question()
            except Exception as error:  # noqa: BLE001 -- each answer stands alone
                told[name] = None
                told[f"{name}_error"] = _in_one_line(error, 300)
    return told


def _in_one_line(error: BaseException, longest: int) -> str:
    """What went wrong, its middle left out where it is long: what it all came from is often told last."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    half = longest // 2 - 2
    return text if len(text) <= longest else f"{text[:half]} … {text[-half:]}"


def _say(report: dict[str, object]) -> None:
    sys.stdout.write("\n" + MARK + json.dumps(report) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Print the report."""
    # What lies beside this script must not stand in for a package of the environment.
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [path for path in sys.path if path != here]
    if arguments[:1] == ["--import"]:
        try:
            _say(_import(arguments[1]))
        except BaseException as error:  # noqa: BLE001 -- whatever foreign imports raise is an answer
            _say({"error": _in_one_line(error, 1000)})
        return
    packages = _packages()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        tools = dict(zip(_TOOLS, pool.map(_tool, _TOOLS)))  # noqa: B905 -- Python 3.9 runs this, too
    include = sysconfig.get_path("include")
    report: dict[str, object] = {
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "prefix": sys.prefix,
            "headers": os.path.isfile(os.path.join(include, "Python.h")),  # noqa: PTH113, PTH118
        },
        "glibc": platform.libc_ver()[1] or None,
        "packages": packages,
        "wanted": _wanted(),
        "sglang": _sglang(),
        "tools": tools,
        "modules": None,
    }
    if arguments[:1] == ["--imports"]:
        seconds = float(arguments[1])
        report["modules"] = {module: _imported(module, seconds) for module in IMPORTS}
    _say(report)


if __name__ == "__main__":
    main(sys.argv[1:])
