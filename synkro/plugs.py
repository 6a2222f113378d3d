"""What happens when another library is imported, be it before Synkro or after it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Action = Callable[[Any], None]


def when_imported(name: str, action: Action) -> None:
    """Call *action* with the module called *name* as soon as it is imported; now, if it is already."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _ImportHook(name, action))


class _ImportHook:
    """Sees one module being imported, has others find it, and is gone then."""

    def __init__(self, name: str, action: Action) -> None:
        self._name = name
        self._action = action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        from importlib.util import find_spec  # noqa: PLC0415  which no worker needs

        with contextlib.suppress(ValueError):  # another thread has removed it
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._action)  # type: ignore[assignment]
        return spec


class _Loader:
    """Loads a module as *loader* does, which it leaves in its place, and calls *action*."""

    def __init__(self, loader: Any, action: Action) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: Any) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)
