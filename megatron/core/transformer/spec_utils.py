"""ModuleSpec: says which class to build and from what, without building it."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModuleSpec:
    """A class (or its (module path, name)), constructor keywords, and specs of its parts."""

    module: tuple[str, str] | type
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None


def import_module(module_path: Sequence[str]) -> Any:
    """The object of a (module path, name) pair, as `--spec PATH NAME` gives it.

    Raises ValueError when the module cannot be imported or has no such name.
    """
    base_path, name = module_path
    try:
        module = importlib.import_module(base_path)
    except ImportError as error:
        raise ValueError(f"module {base_path!r} of the spec cannot be imported: {error}") from error
    if not hasattr(module, name):
        raise ValueError(f"module {base_path!r} has no {name!r}, which the spec names")
    return getattr(module, name)


def get_module(spec_or_module: ModuleSpec | type | tuple[str, str]) -> Any:
    """The class or function a spec stands for."""
    if isinstance(spec_or_module, ModuleSpec):
        spec_or_module = spec_or_module.module
    if isinstance(spec_or_module, tuple):
        return import_module(spec_or_module)
    return spec_or_module


def build_module(
    spec_or_module: ModuleSpec | type | tuple[str, str], *args: Any, **kwargs: Any
) -> Any:
    """Build what the spec says; a function is returned as it is.

    The keyword `stage` is passed on to classes that take it and left out for others, so that
    layers written for Megatron can be used.
    """
    module = get_module(spec_or_module)
    if isinstance(module, types.FunctionType):
        return module
    if isinstance(spec_or_module, ModuleSpec):
        kwargs.update(spec_or_module.params)
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
    if "stage" in kwargs and not _takes(module, "stage"):
        del kwargs["stage"]
    return module(*args, **kwargs)


def _takes(callable_: Any, keyword: str) -> bool:
    parameters = inspect.signature(callable_).parameters
    return keyword in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )
