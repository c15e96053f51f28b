"""Flows by name, and flows from a user's file."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flowlib.core.errors import FlowlibError, FlowLoadError, OptionError, UnknownFlowError, did_you_mean
from flowlib.core.flow import vFlow

FlowType = TypeVar("FlowType", bound=type[vFlow])
_FLOWS: dict[str, type[vFlow]] = {}
_ALIASES: dict[str, str] = {}


def register(name: str, *aliases: str) -> Callable[[FlowType], FlowType]:
    """Class decorator: makes a vFlow known by `name` and by its aliases.

    Raises:
        OptionError: the class is no vFlow, or the name belongs to another class.
    """

    def record(flow_type: FlowType) -> FlowType:
        if not (inspect.isclass(flow_type) and issubclass(flow_type, vFlow)):
            raise OptionError(f"register({name!r}): {flow_type!r} is not a subclass of vFlow")
        for label in (name, *aliases):
            owner = _FLOWS.get(_ALIASES.get(label, label))
            if owner is not None and _identity(owner) != _identity(flow_type):
                raise OptionError(
                    f"register({name!r}): {label!r} is taken by {owner.__module__}.{owner.__qualname__}; "
                    "choose another name"
                )
        _FLOWS[name] = flow_type
        flow_type.flow_name = name
        _ALIASES.update(dict.fromkeys(aliases, name))
        return flow_type

    return record


def registered() -> list[str]:
    """Registered names, aliases left out, sorted."""
    return sorted(_FLOWS)


def aliases_of(name: str) -> list[str]:
    """The aliases of a registered name, sorted."""
    return sorted(alias for alias, target in _ALIASES.items() if target == name)


def find(name: str) -> type[vFlow]:
    """The class registered under a name or an alias. Raises UnknownFlowError with the nearest name."""
    flow_type = _FLOWS.get(_ALIASES.get(name, name))
    if flow_type is None:
        near = did_you_mean(name, [*_FLOWS, *_ALIASES])
        raise UnknownFlowError(f"unknown flow {name!r}.{near} Known: {', '.join(registered())}")
    return flow_type


def construct(name: str, options: dict[str, object]) -> vFlow:
    """An instance of a registered flow.

    Raises:
        UnknownFlowError: no such flow.
        OptionError: an option the flow does not take, or a value it refuses.
    """
    flow_type = find(name)
    accepted = [p for p in inspect.signature(flow_type.__init__).parameters if p != "self"]
    if flow_type.__init__ is object.__init__:
        accepted = []
    for option in options:
        if option not in accepted:
            known = ", ".join(accepted) or "none"
            raise OptionError(
                f"flow {name!r} has no option {option!r} (its options: {known}).{did_you_mean(option, accepted)}"
            )
    try:
        return flow_type(**options)
    except FlowlibError:
        raise
    except (TypeError, ValueError) as error:
        raise OptionError(f"flow {name!r} refused its options {options}: {error}") from error


def load_file(path: str | Path) -> None:
    """Imports a user's ``.py`` file, so that the flows in it are registered; a failed import registers nothing.

    Raises:
        FlowLoadError: there is no such file, or it fails to import; the message has the failing line.
    """
    source = Path(path)
    if not source.is_file():
        raise FlowLoadError(f"flow file {str(path)!r} does not exist; module_path takes the path of a .py file")
    digest = hashlib.sha256(str(source.resolve()).encode() + source.read_bytes()).hexdigest()[:12]
    module_name = f"flowlib_user_{source.stem}_{digest}"
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, source)
    if spec is None or spec.loader is None:
        raise FlowLoadError(f"flow file {str(path)!r} is no Python file; module_path takes the path of a .py file")
    module = importlib.util.module_from_spec(spec)
    before = (dict(_FLOWS), dict(_ALIASES))
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(module_name, None)
        _restore(*before)
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise FlowLoadError(f"flow file {str(path)!r} failed to import: {_brief(error, source)}") from error


def _restore(flows: dict[str, type[vFlow]], aliases: dict[str, str]) -> None:
    _FLOWS.clear()
    _FLOWS.update(flows)
    _ALIASES.clear()
    _ALIASES.update(aliases)


def _brief(error: BaseException, source: Path) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(source)]
    line = f" ({source.name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename == str(source):
        line = f" ({source.name}:{error.lineno}: {(error.text or '').strip()})"
        return f"SyntaxError: {error.msg}{line}"
    return f"{type(error).__name__}: {error}{line}"


def _identity(flow_type: type) -> tuple[str, str]:
    source = inspect.getsourcefile(flow_type) if flow_type.__module__ != "__main__" else "__main__"
    return (source or flow_type.__module__, flow_type.__qualname__)
