"""What the command line says in one line instead of a traceback."""


class CommandError(RuntimeError):
    """A command that cannot go on; its text is the one line that the user sees, with exit code 1."""


class UsageError(CommandError):
    """A bad option or file; exit code 2."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
