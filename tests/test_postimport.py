"""Contract of post-import hooks: a hook runs once per import, after the module's own code and before its importer goes
on; at once for a module that is there already; hooks stack with other finders and leave no trace on the module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

import pytest

from verl_rounding_align import postimport as _postimport


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make modules of a given source on sys.path; they and their hooks are gone after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(source: str = "value = 1\n") -> str:
        name = f"hooked_{tmp_path.name}_{len(made)}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(source)
        made.append(name)
        importlib.invalidate_caches()
        return name

    yield make
    for name in made:
        sys.modules.pop(name, None)
        _postimport._finder.hooks.pop(name, None)


def test_a_hook_runs_after_the_module_and_before_its_importer_goes_on(module):
    name = module("value = 1\n")
    importer = module(f"from {name} import value\n")
    _postimport.install({name: lambda m: setattr(m, "value", m.value + 1)})
    assert name not in sys.modules
    assert importlib.import_module(importer).value == 2


def test_a_module_that_is_there_already_is_hooked_at_once(module):
    name = module()
    importlib.import_module(name)
    seen = []
    _postimport.install({name: seen.append})
    assert seen == [sys.modules[name]]


@pytest.mark.parametrize("imported_first", [False, True])
def test_the_same_hook_twice_runs_once(module, imported_first):
    name, seen = module(), []
    if imported_first:
        importlib.import_module(name)
    for _ in range(2):
        _postimport.install({name: seen.append})
    importlib.import_module(name)
    assert len(seen) == 1


def test_hooks_of_one_module_run_in_order_of_installation(module):
    name, seen = module(), []
    for i in range(3):
        _postimport.install({name: lambda m, i=i: seen.append(i)})
    importlib.import_module(name)
    assert seen == [0, 1, 2]


def test_a_failing_hook_fails_the_import(module):
    name = module()

    def refuse(m):
        raise ImportError("not this version")

    _postimport.install({name: refuse})
    with pytest.raises(ImportError, match=r"^not this version$"):
        importlib.import_module(name)
    assert name not in sys.modules


def test_the_module_keeps_its_own_loader(module):
    hooked, plain = module(), module()
    _postimport.install({hooked: lambda m: None})
    a, b = importlib.import_module(hooked), importlib.import_module(plain)
    assert type(a.__loader__) is type(a.__spec__.loader) is type(b.__loader__)


def test_another_finder_that_stands_first_still_works(module, monkeypatch):
    name, seen = module(), []

    class Other:
        @staticmethod
        def find_spec(fullname, path=None, target=None):
            if fullname == name:
                seen.append("other")
            return None

    _postimport.install({name: lambda m: seen.append("hook")})
    monkeypatch.setattr(sys, "meta_path", [Other, *sys.meta_path])
    importlib.import_module(name)
    assert seen[0] == "other" and seen[-1] == "hook" and seen.count("hook") == 1


def test_half_a_module_is_refused(module):
    """Its import began before there was a hook, so nothing would call the hook at its end."""
    name = module()
    half = types.ModuleType(name)
    half.__spec__ = importlib.util.find_spec(name)
    half.__spec__._initializing = True
    sys.modules[name] = half
    message = f"^cannot hook {name}: its import has begun already and is not finished$"
    with pytest.raises(ImportError, match=message):
        _postimport.install({name: lambda m: None})
