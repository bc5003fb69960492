"""The short programs that a unit runs around the engine, by the serving interpreter's ``-c``.

They stand in the unit itself, a line of Python an argument: the unit then needs neither this tool nor curl on
the machine that it runs on, and whoever reads the unit sees all that it does.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_deploy.deploy.escape import command_word, executable
from dflash_deploy.deploy.seal import Seal
from dflash_deploy.proxy import own_addresses

_PORT_CHECK = """\
import os, socket
host, port = sys.argv[1], int(sys.argv[2])
family = socket.AF_INET6 if ':' in host else socket.AF_INET
try:
    socket.create_server((host, port), family=family).close()
except OSError as error:
    sys.exit(f'{host} port {port} cannot be listened on: {os.strerror(error.errno or 0)}')
"""

# The engine answers /health with 200 only after it has generated a token; a router answers /readiness so when
# one of its engines is well. The main process is watched because systemd waits for this program even when the
# other has died.
_READY_WAIT = """\
import http.client, os, time
host, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
while True:
    try:
        os.kill(int(os.environ['MAINPID']), 0)
    except ProcessLookupError:
        sys.exit('the engine ended before it answered: its own lines above say why')
    try:
        connection = http.client.HTTPConnection(host, port, timeout=30)
        connection.request('GET', path)
        if connection.getresponse().status == 200:
            break
    except (OSError, http.client.HTTPException):
        pass
    time.sleep(1)
"""

_SEAL_CHECK = """\
import glob, hashlib
site, wanted, *files = sys.argv[1:]
def end(why):
    sys.exit(why + ' (dflash-deploy service install makes a generation for what is there now)')
found = []
for name in glob.glob(glob.escape(site) + '/[sS][gG][lL]ang-*.dist-info/METADATA'):
    with open(name, encoding='utf-8', errors='replace') as file:
        found += [line.split(':')[1].strip() for line in file if line.startswith('Version:')][:1]
if found != [wanted]:
    end(f'{site} has SGLang {", ".join(found) or "not at all"}, and the service is for {wanted}')
if cut := glob.glob(glob.escape(site) + '/.dflash-deploy-patches/*.[ar]*ing.json'):
    end('a patch was cut short, or goes on right now: ' + cut[0])
for path, sha256 in zip(files[::2], files[1::2]):
    try:
        with open(path, 'rb') as file:
            now = hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        end(path + ': ' + error.strerror)
    if now != sha256:
        end(path + ' is not as its patch left it')
"""

# Memory of a server that has just ended comes back late; an engine started before that makes its pool
# smaller. Without a driver, or on a card without memory of its own, there is nothing to wait for. A card's
# number means the driver's order only under CUDA_DEVICE_ORDER=PCI_BUS_ID; else any cards count.
_VRAM_WAIT = """\
import ctypes, os, time
wanted, bound_s, cards = map(int, sys.argv[1:4])
class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ('total', 'free', 'used')]
try:
    nvml = ctypes.CDLL('libnvidia-ml.so.1')
except OSError:
    sys.exit(0)
count = ctypes.c_uint()
if nvml.nvmlInitWithFlags(0) or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
    sys.exit(0)
named = [one for one in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if one]
if not all(one.startswith('GPU-') for one in named) and os.environ.get('CUDA_DEVICE_ORDER') != 'PCI_BUS_ID':
    named = []
def free_mib(one):
    card, memory = ctypes.c_void_p(), Memory()
    if one.startswith('GPU-'):
        failed = nvml.nvmlDeviceGetHandleByUUID(one.encode(), ctypes.byref(card))
    else:
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(int(one), ctypes.byref(card))
    if failed or nvml.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory)):
        return None
    return memory.free >> 20
deadline = time.monotonic() + bound_s
while True:
    free = [free_mib(one) for one in named or map(str, range(count.value))]
    if None in free or sum(one >= wanted for one in free) >= min(cards, len(free)):
        sys.exit(0)
    if time.monotonic() > deadline:
        sys.exit(f'{max(free)} MiB of VRAM are free, {wanted} are needed: nvidia-smi lists who holds it')
    time.sleep(1)
"""

# The engine logs its settings when it starts, the key among them. Here it is started by a program that puts
# another word in the key's place in all that is written to its output; processes that the engine starts log
# none of its settings.
_WITHOUT_KEY = """\
import runpy, sys, yaml
with open(sys.argv[sys.argv.index('--config') + 1], encoding='utf-8') as file:
    key = str(yaml.safe_load(file)['api-key'])
for stream in (sys.stdout, sys.stderr):
    stream.write = lambda text, write=stream.write: write(text.replace(key, '(the API key)'))
del sys.argv[1]
runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)
"""

# The router takes a key by its command line alone: it is put there after the process has started, where no
# other process sees it.
_ROUTER = """\
import runpy, sys, yaml
place = sys.argv.index('--config')
with open(sys.argv[place + 1], encoding='utf-8') as file:
    sys.argv[place:place + 2] = ['--api-key', str(yaml.safe_load(file)['api-key'])]
del sys.argv[1]
runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)
"""

# Behind a proxy an engine's request to itself, or a router's to its engines, would go there. What is spared
# already is known only now: it may come from the manager, a drop-in, or whoever starts the container.
_PAST_PROXIES = """\
import os, sys
own, program = sys.argv[1:3]
lower, upper = map(os.environ.get, ('no_proxy', 'NO_PROXY'))
for name, theirs in (('no_proxy', lower or upper), ('NO_PROXY', upper or lower)):
    os.environ[name] = '*' if theirs == '*' else theirs + ',' + own if theirs else own
os.execvp(program, sys.argv[2:])
"""

# Where a server that listens on every address is reached from the machine itself.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not bound


def port_check(python: str, host: str, port: int) -> str:
    """The ``ExecStartPre=`` value that ends in failure when the port cannot be listened on."""
    return _program(python, _PORT_CHECK, host, str(port))


def seal_check(python: str, seal: Seal) -> str:
    """The ``ExecStartPre=`` value that ends in failure when the engine or a patch is not what it was."""
    files = [word for file in seal.files for word in (file.path, file.sha256)]
    return _program(python, _SEAL_CHECK, seal.site_packages, seal.version, *files)


def vram_wait(python: str, free_mib: int, *, bound_s: int, cards: int) -> str:
    """The ``ExecStartPre=`` value that waits until so many cards have so much memory free each."""
    return _program(python, _VRAM_WAIT, str(free_mib), str(bound_s), str(cards))


def ready_wait(python: str, host: str, port: int, path: str = "/health") -> str:
    """The ``ExecStartPost=`` value that ends when the engine answers, or fails when the engine has ended."""
    return _program(python, _READY_WAIT, reached_at(host), str(port), path)


def engine_with_key(argv: Sequence[str]) -> tuple[str, ...]:
    """The engine's command for a key in its ``--config`` file, which is then not in what it logs.

    A command that starts no module (``-m``) stays as it is.
    """
    return _wrapped(argv, _WITHOUT_KEY)


def router_with_key(argv: Sequence[str]) -> tuple[str, ...]:
    """The router's command, whose ``--config`` file holds its key."""
    return _wrapped(argv, _ROUTER)


def past_proxies(argv: Sequence[str], host: str) -> tuple[str, ...]:
    """The command of a server on ``host``, which then reaches its own address past every proxy."""
    return (argv[0], *_run(_PAST_PROXIES), own_addresses(host), *argv)


def _wrapped(argv: Sequence[str], source: str) -> tuple[str, ...]:
    python, *arguments = argv
    if arguments[:1] != ["-m"]:
        return tuple(argv)
    return (python, *_run(source), *arguments)


def _run(source: str) -> tuple[str, ...]:
    """What an interpreter is given to run it, with the arguments that follow."""
    lines = source.splitlines()
    end = len(lines) + 1
    run = f"import sys; source = sys.argv[1:{end}]; del sys.argv[1:{end}]; exec('\\n'.join(source))"
    return ("-c", run, *lines)


def reached_at(host: str) -> str:
    """Where an engine that listens there is reached from the machine itself."""
    return _LOOPBACK.get(host, host)


def _program(python: str, source: str, *arguments: str) -> str:
    end = len(arguments) + 1
    run = f"import sys; source = sys.argv[{end}:]; del sys.argv[{end}:]; exec('\\n'.join(source))"
    first = " ".join([executable(python), *map(command_word, ("-c", run, *arguments))])
    return " \\\n  ".join([first, *map(command_word, source.splitlines())])
