"""Errors a person can act on: shown as one paragraph, once, with an exit code, never as a traceback a rank."""

from __future__ import annotations


class TrainingError(Exception):
    """Something the user can put right: the message says what was found, what is allowed and what to do."""

    exit_code = 1
    alike = False  # every rank of a machine finds it alike, before it has joined: one of them is enough to say it


class ConfigError(TrainingError, ValueError):
    """A key that does not exist, or a value that is not allowed."""

    exit_code = 2

    def __init__(self, key: str, value: object, allowed: str, hint: str = ""):
        """State that `key` was `value` where `allowed` is allowed; `hint` says what to do.

        The arguments go to `Exception` as they are, so that the error survives being sent between processes.
        """
        super().__init__(key, value, allowed, hint)
        self.key, self.value, self.allowed, self.hint = key, value, allowed, hint

    def __str__(self) -> str:
        value = repr(self.value) if isinstance(self.value, str) else yaml_word(self.value)
        text = f"{self.key} = {value}: {self.allowed}."
        return f"{text} {self.hint}" if self.hint else text


class NotSupportedYet(ConfigError):
    """A key whose feature is not built yet, set to something other than its neutral value."""

    def __init__(self, key: str, value: object, neutral: object):
        super().__init__(key, value, "not supported yet", hint=f"Leave it at {yaml_word(neutral)}.")
        self.args = (key, value, neutral)


class UnknownKey(TrainingError):
    """A key that no section has, or a file or argument that cannot be read."""

    exit_code = 2


class NonFiniteLoss(TrainingError):
    """The loss or the gradient norm became NaN or infinite."""


class RankFailed(TrainingError):
    """One rank of the run died or raised; the others were ended."""


def as_training_error(error: Exception) -> TrainingError:
    """An error about the user's input (a file, a value) as one paragraph that needs no traceback."""
    if isinstance(error, TrainingError):
        return error
    return TrainingError(f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error))


def yaml_word(value: object) -> str:
    """The value as it is written in YAML and on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(yaml_word(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {yaml_word(item)}" for name, item in value.items()) + "}"
    return str(value)
