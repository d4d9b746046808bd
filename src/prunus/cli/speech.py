"""How the command line speaks: results on stdout, everything else on stderr, mistakes as one plain sentence."""

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from prunus.errors import PrunusError, PrunusWarning

ENDLESS = 10_000
INTERRUPTED = 130
USER = 2


class Interrupted(Exception):
    """Ctrl-C, with what it means for what was under way (typer keeps a plain KeyboardInterrupt's words to itself)."""


def out() -> Console:
    """Where results go; lines are broken on terminals alone."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=ENDLESS)


def err() -> Console:
    """Where everything else goes."""
    return Console(stderr=True, highlight=False)


def note(text: str, console: Console | None = None) -> None:
    """A plain line on stderr, never broken where it is not read on a terminal."""
    console = console or err()
    console.print(Text(text), soft_wrap=not console.is_terminal)


def error(sentence: str) -> None:
    """Say what went wrong."""
    console = err()
    console.print(Text.assemble(("error: ", "bold red"), sentence), soft_wrap=not console.is_terminal)


def warn(sentence: str) -> None:
    """Say what might go wrong."""
    console = err()
    console.print(Text.assemble(("warning: ", "yellow"), sentence), soft_wrap=not console.is_terminal)


@contextmanager
def plain_warnings(show: Callable[[str], None]) -> Iterator[None]:
    """Show Prunus' own warnings as plain lines, each once; leave other libraries' to Python."""
    said: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        before = warnings.showwarning

        def hook(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **named: Any) -> None:
            text = str(message)
            if not issubclass(category, PrunusWarning):
                if issubclass(category, UserWarning) and "site-packages" in filename:
                    return  # other libraries' advice to whoever calls them: not the user here
                before(message, category, filename, *rest, **named)
            elif text not in said:
                said.add(text)
                show(text)

        warnings.showwarning = hook
        yield


def guarded(call: Callable[[], Any]) -> int:
    """Call something and give the exit code; what the user can do something about becomes one sentence."""
    usage = typer.BadParameter.__mro__[1:-2]  # typer's usage errors, wherever this version of typer keeps their class
    try:
        with plain_warnings(warn):
            result = call()
        if result == INTERRUPTED:
            error("Interrupted.")
        return result if isinstance(result, int) else 0
    except PrunusError as problem:
        error(str(problem))
        return problem.exit_code
    except Interrupted as problem:
        error(str(problem))
        return INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        error("Interrupted.")
        return INTERRUPTED
    except OSError as problem:
        if problem.errno == errno.EPIPE:  # whoever read our output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        what = f"{problem.filename} cannot be used: " if problem.filename else ""
        error(f"{what}{problem.strerror or problem}.")
        return USER
    except Exception as problem:
        if isinstance(problem, usage) and hasattr(problem, "format_message"):
            return _misused(problem, problem.format_message().strip())
        if type(problem).__name__ == "OutOfMemoryError":
            error("The device ran out of memory; choose a smaller --batch-size, and --accumulate to make up for it.")
            return USER
        raise


def _misused(problem: Exception, sentence: str) -> int:
    """A command line that cannot be read; a command without arguments shows its help."""
    if type(problem).__name__ == "NoArgsIsHelpError":
        out().print(Text(sentence), soft_wrap=True)
        return 0
    context = getattr(problem, "ctx", None)
    hint = f" Try: {context.command_path} --help" if context is not None else ""
    error(sentence + ("" if sentence.endswith((".", "?")) else ".") + hint)
    return USER
