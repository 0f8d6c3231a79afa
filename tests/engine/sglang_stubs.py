"""Stand-ins for packages that SGLang imports on its way to HiCache and does not use there.

They are compilers and GPU code of gigabytes. Import this before anything of SGLang.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

# These look for the packages too and must not find the stand-ins.
for early in (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.runtime.autotune_cache",
    "transformers.image_utils",
):
    importlib.import_module(early)

NAMES = {"IPython", "gguf", "torchvision", "triton"}


class _AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():  # a decorator, with arguments or without
            return lambda *arguments, **more: arguments[0] if arguments and not more else lambda made: made
        return _AnyName(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.insert(0, _Finder())
