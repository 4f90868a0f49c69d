"""The commands, one file each. To add NAME: `cli/NAME.py` with `run(arguments: list[str]) -> exit code`, a settings
class in `settings.py`, its line in COMMANDS below, and the file's line in the README's tree.

`run` may raise: SettingsError or ValidationError for wrong usage (exit code 2), ConfigError, ValueError, MemoryError or
OSError for what could not be done (exit code 1). `__main__.py` prints either as one line. Files here are imported only
when their command runs; keep torch out of the way of the checks that come first.
"""

COMMANDS = {
    "serve": "start the server",
    "plan": "show how many sequences fit in memory, before any weight is read",
    "generate": "stream one answer to the terminal",
    "chat": "talk to the model in the terminal",
    "bench": "measure the model on this machine, without HTTP",
}
