"""Run a function right after a module has been imported.

A plugin that must change `verl.workers.engine` need not import it: importing it from the `verl.plugins` entry point
costs more than a second in every process and meets a half-imported verl. `install` waits for the import instead.
Standard library only.
"""

import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]


class _HookedLoader(Loader):
    """The module's own loader, followed by the hooks; an exception in a hook fails the import."""

    def __init__(self, loader: Loader, hooks: list[Hook]):
        self._loader = loader
        self._hooks = hooks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # From here on the module looks as if no hook had been there (inspect, importlib.resources, reload).
        module.__loader__ = module.__spec__.loader = self._loader
        for hook in list(self._hooks):
            hook(module)

    def __getattr__(self, name: str):  # get_source, is_package, get_resource_reader, ...
        return getattr(self._loader, name)


class _HookFinder(MetaPathFinder):
    """First on sys.meta_path; lets the other finders find the module and wraps the loader they return."""

    def __init__(self):
        self.hooks: dict[str, list[Hook]] = {}

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        hooks = self.hooks.get(name)
        if not hooks:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:  # None for a namespace package, which runs no code
                    spec.loader = _HookedLoader(spec.loader, hooks)
                return spec
        return None


_finder = _HookFinder()


def install(hooks: Mapping[str, Hook]) -> None:
    """Call `hook(module)` right after each named module is imported, at once if it is imported already.

    Installing the same hook for the same module again does nothing. Hooks of one module run in the order of their
    installation; an exception in a hook propagates to whoever imports the module.

    Args:
        hooks: full module name to hook.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name, hook in hooks.items():
        known = _finder.hooks.setdefault(name, [])
        if hook in known:
            continue
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        from_loader = module is None or isinstance(getattr(spec, "loader", None), _HookedLoader)
        if not from_loader and getattr(spec, "_initializing", False):
            # Now would be too early, half the module is missing, and its loader knows of no hooks.
            raise ImportError(f"cannot hook {name}: its import has begun already and is not finished")
        known.append(hook)
        if not from_loader:
            hook(module)
