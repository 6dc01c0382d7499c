"""An argument parser whose complaints are UsageErrors that name the option, the suggestion and the right help."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import UsageError


class Parser(argparse.ArgumentParser):
    """A parser of one command; `commands` are the commands below it by name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # Abbreviated options would change their meaning when an option is added.
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.commands: dict[str, Parser] = {}

    def add_commands(self, dest: str, metavar: str) -> Any:
        """Add commands below this one; `dest` is the attribute for the name of the chosen command."""
        action = self.add_subparsers(dest=dest, metavar=metavar, required=True, parser_class=Parser)
        self.commands = action.choices
        return action

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError; argparse's "argument --lr: abc: expected ..." becomes "--lr abc: expected ..."."""
        message = re.sub(r"^argument (\S+): (?=\S+: )", r"\1 ", message)
        message = message.removeprefix("argument ")
        raise UsageError(f"{message} ({self.prog} --help)")

    def check_options(self, words: Sequence[str]) -> None:
        """Refuse an option that the command of these words does not have, before argparse looks at any of them."""
        for number, word in enumerate(words):
            if self.commands and not word.startswith("-"):
                self._command(word).check_options(words[number + 1 :])
                return
            if word == "--":
                return
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in self._option_string_actions:
                self.error(self._unknown(name))

    def _command(self, name: str) -> Parser:
        if name not in self.commands:
            close = difflib.get_close_matches(name, self.commands, n=1, cutoff=0.5)
            hint = f' Did you mean "{close[0]}"?' if close else ""
            raise UsageError(f'{self.prog} has no command "{name}".{hint} ({self.prog} --help)')
        return self.commands[name]

    def _unknown(self, name: str) -> str:
        known = sorted(self._option_string_actions)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        return f"no option {name}." + (f" Did you mean {close[0]}?" if close else "")
