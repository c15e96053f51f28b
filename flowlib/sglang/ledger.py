"""Every symbol of SGLang that flowlib touches: what, why, how and until when.

The same table registers the hooks, is checked against the running process when a flow is asked for, and is compared
with the installed SGLang by a contract test.
"""

import dis
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flowlib.core.errors import BackendError

NATIVE = "SGLang has sparse attention as a plugin point"
STABLE = "as long as SGLang has it"
"""What would make an entry unnecessary."""


def names(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


@dataclass(frozen=True)
class Touch:
    """One symbol of SGLang.

    Args:
        target: its dotted path.
        why: what flowlib needs it for.
        how: ``replace``, ``around`` and ``after`` are hooks; ``lend`` is another value for the time of a call inside
            one; ``extend``, ``call`` and ``read`` are ordinary use.
        until: what would make the entry unnecessary.
        takes: parameters that flowlib passes or receives, by name.
        reads: attributes that flowlib reads from instances.
        hook: dotted path of flowlib's function or class, for hooks.
    """

    target: str
    why: str
    how: str
    until: str
    takes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    hook: str = ""


def touched() -> tuple[Touch, ...]:
    """What is touched in the installed SGLang: in every version, and in this one alone."""
    from flowlib.sglang.symbols import TOUCHED
    from flowlib.sglang.versions import adapter

    return TOUCHED + adapter().TOUCHED


def hooks() -> Iterator[Touch]:
    """The entries that patch SGLang."""
    return (touch for touch in touched() if touch.hook)


def register_hooks() -> None:
    """Registers the ledger's hooks with SGLang, which applies them after all plugins have been loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for touch in hooks():
        HookRegistry.register(touch.target, pkgutil.resolve_name(touch.hook), HookType(touch.how))


def check_hooks() -> None:
    """Raises a BackendError that names the hooks that did not take in this process."""
    missing = [touch.target for touch in hooks() if not has_taken(touch)]
    if missing:
        raise BackendError(f"these hooks into SGLang did not take: {', '.join(missing)} (SGLang's log may say why)")


def has_taken(touch: Touch) -> bool:
    """Whether SGLang's symbol now leads to flowlib's hook."""
    hook = pkgutil.resolve_name(touch.hook)
    try:
        found = pkgutil.resolve_name(touch.target)
    except (ImportError, AttributeError):
        return False
    return found is hook if isinstance(hook, type) else _wraps(found, hook)


def _wraps(found: Any, hook: Callable[..., Any]) -> bool:
    while found is not None:
        function = getattr(found, "__func__", found)
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def contract_problem(touch: Touch) -> str | None:
    """What of an entry the installed SGLang does not keep; ``None`` when it keeps all of it."""
    try:
        found = pkgutil.resolve_name(touch.target)
    except (ImportError, AttributeError) as error:
        return f"{touch.target}: not found ({error})"
    if touch.takes:
        known = inspect.signature(inspect.unwrap(found)).parameters
        lost = [name for name in touch.takes if name not in known]
        if lost:
            return f"{touch.target}: takes no {', '.join(lost)}; it takes {', '.join(known)}"
    lost = [name for name in touch.reads if not _has_attribute(found, name)]
    return f"{touch.target}: has no {', '.join(lost)}" if lost else None


def _has_attribute(cls: type, name: str) -> bool:
    if hasattr(cls, name) or any(name in vars(base).get("__annotations__", {}) for base in cls.__mro__):
        return True
    functions = (f for base in cls.__mro__ for f in vars(base).values() if inspect.isfunction(f))
    return any(i.opname == "STORE_ATTR" and i.argval == name for f in functions for i in dis.get_instructions(f))
