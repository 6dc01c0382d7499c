"""Built-in members and those of installed packages are found by name, and a broken package is one clear line."""

from __future__ import annotations

import pytest

from bitfit.errors import UsageError
from bitfit.plugins import Registry

BUILTIN = {"join": "posixpath:join", "split": "posixpath:split"}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that makes an installed package with entry points of group "bitfit.tests"."""

    def install(name, points, module=""):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "".join(f"{key} = {value}\n" for key, value in points.items())
        (folder / "entry_points.txt").write_text(f"[bitfit.tests]\n{lines}")
        (tmp_path / f"{name}.py").write_text(module)
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_built_in_members_are_found_by_name():
    import posixpath

    registry = Registry("bitfit.tests", BUILTIN)
    assert registry["join"] is posixpath.join and list(registry) == ["join", "split"] and len(registry) == 2


def test_an_installed_package_adds_a_member(install):
    install("adds_one", {"third": "adds_one:third"}, "third = 3")
    registry = Registry("bitfit.tests", BUILTIN)
    assert registry["third"] == 3 and list(registry) == ["join", "split", "third"]


def test_a_package_installed_later_is_found_after_a_reset(install):
    registry = Registry("bitfit.tests", BUILTIN)
    assert "late" not in registry
    install("adds_late", {"late": "adds_late:late"}, "late = 4")
    registry.reset()
    assert registry["late"] == 4


def test_a_broken_package_is_one_line_that_names_it_and_disturbs_nobody_else(install):
    install("is_broken", {"fourth": "is_broken:fourth"}, "import no_such_module_anywhere")
    registry = Registry("bitfit.tests", BUILTIN)
    assert registry["join"] and "fourth" in registry
    with pytest.raises(UsageError, match=r"package is_broken: .*'fourth'.*no_such_module_anywhere.*uninstall") as error:
        registry["fourth"]
    assert "\n" not in str(error.value)


def test_a_package_cannot_replace_a_built_in_member(install):
    install("replaces", {"join": "replaces:join"}, "join = 1")
    with pytest.raises(UsageError, match=r"package replaces adds .*'join', which exists already"):
        list(Registry("bitfit.tests", BUILTIN))


def test_an_unknown_name_suggests_the_right_one():
    registry = Registry("bitfit.tests", BUILTIN)
    with pytest.raises(UsageError, match=r'no test "joint". Did you mean "join"'):
        registry.member("joint", "test")
    with pytest.raises(KeyError):
        registry["joint"]
