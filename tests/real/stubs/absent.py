"""Packages of which every name can be imported, though nothing is behind it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _AnyAttribute(type):
    """Classes that have every attribute, each of them another such class."""

    def __getattr__(cls, name: str) -> type:
        return anything(name)


class _Uncallable(type):
    def __getattr__(cls, name: str) -> type:
        return uncallable(name)

    def __call__(cls, *_arguments: object, **_options: object) -> Any:
        raise NotImplementedError(f"{cls.__name__} is not among the operations that the stubs have")


class _Anything(metaclass=_AnyAttribute):
    def __init__(self, *_arguments: object, **_options: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return anything(name)

    def __call__(self, *_arguments: object, **_options: object) -> Any:
        return self


def anything(name: str) -> type:
    """A class to inherit from, call, or take attributes of.

    Raises:
        AttributeError: for a name that Python itself asks for; pretending to have it would change behaviour.
    """
    _refuse_special(name)
    return _AnyAttribute(name, (_Anything,), {})


def uncallable(name: str) -> type:
    """Something to import and to take attributes of, but not to call: its attributes are the same."""
    _refuse_special(name)
    return _Uncallable(name, (), {})


def fill(package: str, attribute: Callable[[str], Any]) -> None:
    """Give a package, and every submodule it lacks, all attributes there can be."""
    _fill_module(sys.modules[package], attribute)
    sys.meta_path.append(_Submodules(package, attribute))


class _Submodules(MetaPathFinder, Loader):
    """Finds any submodule of ``package`` that has no file; the files were looked for before."""

    def __init__(self, package: str, attribute: Callable[[str], Any]) -> None:
        self._prefix = f"{package}."
        self._attribute = attribute

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self._prefix) or (path and PathFinder.find_spec(fullname, path)):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, _spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        _fill_module(module, self._attribute)


def _fill_module(module: ModuleType, attribute: Callable[[str], Any]) -> None:
    def get(name: str) -> Any:
        value = attribute(name)
        setattr(module, name, value)
        return value

    module.__getattr__ = get  # type: ignore[method-assign]


def _refuse_special(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)
