"""Registries: built-in members and members that installed packages add, looked up by name in the same way.

A package adds a member with an entry point of the registry's group, e.g. in its pyproject.toml

    [project.entry-points."bitfit.strategies"]
    lowest = "my_package:lowest"

Built-in members are entry points too, listed where the registry is created. Nothing is imported before its name is
looked up, so a broken package affects only those who use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from .errors import UsageError, suggest

if TYPE_CHECKING:  # imported where it is used: `bitfit --help` makes registries, but looks nothing up
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """The members of one group by name, each loaded when it is first looked up.

    `builtin` maps names to "module:attribute", as entry points do. An installed package may add names but not replace
    built-in ones.
    """

    def __init__(self, group: str, builtin: Mapping[str, str]) -> None:
        self.group = group
        self._builtin = dict(builtin)
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            self._loaded[name] = cast(T, self._load(self._entry(name)))
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._builtin
        yield from self._installed

    def __len__(self) -> int:
        return len(self._builtin) + len(self._installed)

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._installed

    def member(self, name: str, what: str) -> T:
        """The member of this name; UsageError with a suggestion if there is none. `what` is the noun of the message."""
        if name not in self:
            raise UsageError(f'no {what} "{name}".{suggest(name, self)}')
        return self[name]

    def reset(self) -> None:
        """Forget what installed packages offer and what was loaded, so that a package installed since is found."""
        self._loaded.clear()
        self.__dict__.pop("_installed", None)

    def _entry(self, name: str) -> EntryPoint:
        from importlib.metadata import EntryPoint

        if name in self._builtin:
            return EntryPoint(name, self._builtin[name], self.group)
        return self._installed[name]

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        from importlib.metadata import entry_points

        installed: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self.group):
            if entry.name in self._builtin or entry.name in installed:
                raise UsageError(
                    f"{_origin(entry)} adds {self.group} {entry.name!r}, which exists already; uninstall it"
                )
            installed[entry.name] = entry
        return installed

    def _load(self, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except Exception as error:  # the module of another package may raise anything when it is imported
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UsageError(
                f"{_origin(entry)}: {self.group} {entry.name!r} cannot be loaded from {entry.value} ({reason}); "
                "update or uninstall the package"
            ) from error


def _origin(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist is not None else "bitfit"
